"""What a controller and its ranks say to each other, over a pipe between local processes.

The controller speaks first; a rank answers every message in order with one `Answer`. Staging ends
later and is told by a `Staged` of its own. Everything here is plain data that pickles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.cluster.rank import Work
from engine.cluster.records import RowRecords
from engine.config import EngineConfig
from engine.events import Flights, Int64, Spans
from engine.exchange.books import Exchanged
from engine.exchange.plan import Move
from engine.faults import Fault
from engine.routing.table import RoutingTable


@dataclass(frozen=True, slots=True)
class Setup:
    """All a new rank must know; travels with the start of its process."""

    me: int
    """This rank's device id, for as long as it lives."""
    config: EngineConfig
    num_positions: int
    """Longest sequence the cache can hold."""
    table: RoutingTable
    store_port: int
    host_copies: str | None
    """The file of `engine.cluster.host_copies`; None if there is none."""
    dies_with_parent: bool
    """Whether the process may end with the thread that started it."""


@dataclass(frozen=True, slots=True)
class Join:
    """Leave the group of the last epoch, join the next one, take up the experts of `table`."""

    epoch: int
    members: tuple[int, ...]
    table: RoutingTable
    now: int
    """Version of the table from which `moves` start; a rank that went beyond it goes back."""
    moves: tuple[Move, ...]
    """What travels between the members."""


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run one step together with all other members."""

    work: Work
    mode: str
    """How rows are exchanged, decided by the controller for all ranks."""
    num_rounds: int
    """Most spans on any rank."""
    table_version: int
    began_ns: int = 0
    """When the controller began the step, by the machine's clock; times are told since then."""
    trial: bool = False
    """Whether it tries a table out; any other step means that the table has proved itself."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Gather, in the background, the experts of a table to come."""

    number: int
    """Of this staging; a version may be tried twice."""
    table: RoutingTable
    moves: tuple[Move, ...]
    """What travels between ranks."""


@dataclass(frozen=True, slots=True)
class Publish:
    """From the next step on read the table of this staging."""

    number: int


@dataclass(frozen=True, slots=True)
class Retract:
    """Go back from the table just published to the one before, of this version."""

    table_version: int


@dataclass(frozen=True, slots=True)
class SetFault:
    """Set a fault at a point of this rank, or heal it with None."""

    point: str
    fault: Fault | None


@dataclass(frozen=True, slots=True)
class Ask:
    """Return what `what` names: `weights_sha256`, `resident_bytes` or `collectives`."""

    what: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End this process."""


Message = Join | RunStep | Stage | Publish | Retract | SetFault | Ask | Stop


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step brought on one rank."""

    tokens: list[int]
    logits_BV: Any
    """(B, V) fp32 numpy array when somebody needs it, else None."""
    last_experts: list[Int64]
    """While smoothing is on: for each span (L, E) how long ago each expert was last used."""
    records: RowRecords | None
    bad_rows: int
    stage_ms: dict[str, float]
    spans: Spans
    """Empty unless the step kept records."""
    flights: Flights
    """Likewise."""
    exchanged: Exchanged
    busy_ms: float
    dropped: list[int]
    """By MoE layer: slots that found no room; empty without a capacity factor."""
    look_ups: tuple[int, int]
    """Answers found in tables since the start, and not found."""
    """Time of the step without waiting for other ranks."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one message."""

    value: Any = None
    error: str | None = None
    """One sentence when it failed; the rank lives on."""


@dataclass(frozen=True, slots=True)
class Staged:
    """Staging has ended, or has come to where ranks wait for one another."""

    number: int
    from_ranks: int = 0
    """Bytes of experts that came from other ranks."""
    from_host: int = 0
    """Bytes of experts that no rank had, from the host's copies."""
    from_checkpoint: int = 0
    """Bytes of experts that nobody had."""
    seconds: float = 0.0
    error: str | None = None
    meets: bool = False
    """Whether only the latter; the end will follow."""
