"""What the engine says about itself: one record per thing that happened, and who listens.

Treat every record as read-only. Those made once a step or a token are not frozen, because freezing
makes a record cost ten times as much. Events carry numbers, ids and numpy arrays in host memory,
never device tensors and never a reference to engine state, so a listener may keep them. `-1` means
"no expert". A listener that falls behind must drop, not wait: `emit` runs inside the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Int16 = npt.NDArray[np.int16]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt8 = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

STAGES = (
    "schedule",
    "plan",
    "draft",
    "embed",
    "attention",
    "gate",
    "select",
    "place",
    "sort",
    "dispatch",
    "wait",
    "transfer",
    "format",
    "experts",
    "combine",
    "head",
    "sample",
    "postprocess",
)
"""Where a step's time goes, in order. `gate` is the router's product, `select` the choice, `sort`
the order by expert, `dispatch` the rows' copies; `plan` decides what a draft model proposes and
what of it stays, `draft` is its passes, `format` chooses number formats; between ranks `wait` is
for the slowest one and `transfer` for rows on their way."""

LEVELS = {
    "expert": ("select",),
    "precision": ("format",),
    "model": ("plan",),
    "device": ("place", "sort"),
}
"""The stages in which each of the four levels decides."""

ROUTING_STAGES = ("plan", "select", "place", "sort", "format")
"""The stages that decide: their share of the step is the routing overhead."""

CAUSES = ("accepted", "preemption", "recovery", "rejected_draft", "precision")
"""Why a row ran: `accepted` rows count once per token, the others are work done again."""


@dataclass(frozen=True, slots=True)
class StartEvent:
    """An engine is ready: what a reader needs to understand all later events."""

    model: str
    num_layers: int
    moe_layers: tuple[int, ...]
    """The model's numbers of the layers along the L axis of `StepEvent`, tables and policies."""
    num_experts: int
    top_k: int
    num_devices: int
    rank_of_phy: tuple[int, ...]
    table_version: int
    deterministic: bool
    dtype: str
    time_s: float


@dataclass(frozen=True, slots=True)
class Decision:
    """The whole level-1 and level-4 decision for one token in one layer, as the step made it."""

    request_id: int
    position: int
    token_id: int
    layer: int
    """The model's number of the layer, one of `StartEvent.moe_layers`."""
    logits: Float32
    """(E,) the gate's product, before policy."""
    scores: Float32
    """(E,) what the selection compared, after policy."""
    topk_ids: Int16
    topk_weights: Float32
    runner_up: int
    """The best expert not chosen, or -1 when all were."""
    margin: float
    """Score of the last chosen expert minus score of the runner-up; inf without a runner-up."""
    physical: Int16
    devices: Int16
    reasons: tuple[str, ...]
    table_version: int
    format: str
    source: tuple[str, ...]
    """`engine/…py:line` of each stage, in the order a token meets them."""
    bias: Float32
    """(E,) added to the logits before scoring: the router's own bias and an operator's."""
    smoothing: Float32
    """(E,) added to the logits because the experts were used lately; 0 while smoothing is off."""
    shut: UInt8
    """(E,) 1 for an expert outside the groups that a group-limited gate kept."""
    capacity: int
    """Rows that each expert could take in this layer; -1 without a limit. A slot beyond it has
    physical expert -1."""
    unit: int
    """The unit of rows that shared a number format, -1 where each row has the engine's."""
    format_reason: str = ""
    """Why the unit got its number format."""
    model: str = "target"
    """Who proposed the token: `draft`, or `target` for a prompt's and its own."""
    verdict: str = ""
    """What became of a proposed token: `accepted` or `rejected`; empty for others."""
    looked_up: tuple[str, ...] = ()
    """The stages whose answer was found in a table of earlier ones instead of worked out."""
    stage_ms: dict[str, float] = field(default_factory=dict)
    """Milliseconds of each stage in this layer, for all rows of the step together."""


@dataclass(slots=True)
class Spans:
    """In which stage one process was when; S spans, one after another, since the step began."""

    stages: UInt8
    """(S,) index into `STAGES`."""
    begin_ms: Float32
    """(S,)"""
    ms: Float32
    """(S,)"""


@dataclass(slots=True)
class Flights:
    """Rows and results that one rank had under way; F of them, in the order of sending.

    All ranks of a step have the same F, layers, parts and directions: each joins every exchange.
    """

    layers: Int16
    """(F,) index among the MoE layers."""
    parts: Int16
    """(F,) part of the batch: 0, or 0 and 1 while two buffers take turns, or one per request."""
    results: UInt8
    """(F,) 0 for rows on the way to their experts, 1 for results on the way home."""
    sent_ms: Float32
    """(F,) since the step began."""
    arrived_ms: Float32
    """(F,) when everything from all ranks had come."""
    rows: Int32
    """(F, G) rows sent to each device, the own one included."""


def no_spans() -> Spans:
    """Return the spans of a process that kept none."""
    return Spans(np.zeros(0, np.uint8), np.zeros(0, np.float32), np.zeros(0, np.float32))


def no_flights(num_devices: int = 0) -> Flights:
    """Return the flights of a rank that kept none."""
    none = np.zeros(0, np.int16)
    times = np.zeros(0, np.float32)
    rows = np.zeros((0, num_devices), np.int32)
    return Flights(none, none, np.zeros(0, np.uint8), times, times, rows)


@dataclass(slots=True)
class RankEvent:
    """What one rank did in one step; all measured on the rank itself."""

    rank: int
    mode: str
    """How rows were exchanged: `naive`, `request`, `grouped` or `overlapped`."""
    rows: Int64
    """(G,) rows sent to each device, summed over layers, the own device included."""
    num_bytes: Int64
    """(G,) bytes sent to each other device: rows, results and counts."""
    messages: Int64
    """(G,) messages sent to each other device."""
    wait_ms: float
    """Waiting until the slowest rank had said how many rows it sends."""
    transfer_ms: float
    """Waiting for rows and results once all were there."""
    busy_ms: float
    """The step without both."""
    stage_ms: dict[str, float]
    spans: Spans = field(default_factory=no_spans)
    flights: Flights = field(default_factory=no_flights)


@dataclass(slots=True)
class UnitEvent:
    """In which number formats one MoE layer ran its rows in one step, and what it ran again.

    A row here is a token in one of its experts.
    """

    layer: int
    """Index among the MoE layers."""
    units: int
    int8_units: int
    """As voted."""
    failed_units: int
    """Predicted wrong, as the check found."""
    rows: int
    int8_rows: int
    """In the end, without those that were run again."""
    rerun_rows: int
    sampled_rows: int
    """Run in both formats to compare."""
    switches: int
    """How often the format changes from one row to the next, in the order of the experts."""
    worst_error: float
    """The largest relative error among the sampled rows; 0 without any."""


def no_formats() -> UInt8:
    """Return the codes of a step in which all rows had the engine's own number format."""
    return np.zeros((0, 0, 0), np.uint8)


@dataclass(slots=True)
class StepEvent:
    """One forward pass over T rows through L MoE layers, K experts a row."""

    step: int
    time_s: float
    """Wall-clock time at the start of the step, seconds since the epoch."""
    duration_ms: float
    table_version: int
    num_running: int
    num_waiting: int
    num_prefill_rows: int
    """Rows whose token belongs to a prompt."""
    request_ids: Int64
    """(T,)"""
    positions: Int32
    """(T,) position of the row's token in its sequence."""
    token_ids: Int32
    """(T,)"""
    homes: Int16
    """(T,) the device whose attention owns the row."""
    causes: UInt8
    """(T,) index into `CAUSES`."""
    topk_ids: Int16
    """(T, L, K) logical experts, best first."""
    phy_ids: Int16
    """(T, L, K) physical experts."""
    topk_weights: Float32
    """(T, L, K)"""
    margins: Float32
    """(T, L)"""
    stage_ms: dict[str, float]
    """Milliseconds by stage, summed over layers; keys from `STAGES`."""
    bad_rows: int
    """Rows whose logits were not finite, summed over layers."""
    decisions: tuple[Decision, ...] = ()
    drafted: UInt8 | None = None
    """(T,) 1 for a token that a draft model proposed, whose cause is then its verdict: `accepted`
    or `rejected_draft`; None in a step without proposals."""
    dropped: tuple[int, ...] = ()
    """By MoE layer: (token, expert) slots that found no room, physical expert -1; () for none."""
    ranks: tuple[RankEvent, ...] = ()
    """One per rank; empty in one process."""
    spans: Spans = field(default_factory=no_spans)
    """Of the engine's own process."""
    formats: UInt8 = field(default_factory=no_formats)
    """(T, L, K) number format and reason of each row in each of its experts, as
    `engine.routing.precision.read_code` reads them; (0, 0, 0) while formats are not routed."""
    units: tuple[UnitEvent, ...] = ()
    """One per MoE layer; empty while formats are not routed."""
    look_ups_found: int = 0
    """Placements and orders of the step that were found in tables of earlier ones."""
    look_ups_missed: int = 0
    """Those that were looked up and had to be worked out."""

    @property
    def num_rows(self) -> int:
        """Rows that went through the model in this step (T)."""
        return len(self.token_ids)

    @property
    def overhead_share(self) -> float:
        """Share of the step spent deciding where tokens go, 0 to 1."""
        deciding = sum(self.stage_ms.get(stage, 0.0) for stage in ROUTING_STAGES)
        return deciding / self.duration_ms if self.duration_ms > 0 else 0.0


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """A request changed its state."""

    request_id: int
    kind: str
    """`added`, `finished`, `aborted` or `preempted`."""
    label: str
    time_s: float
    prompt_token_ids: tuple[int, ...] = ()
    """Only with `added`."""
    finish_reason: str | None = None


@dataclass(slots=True)
class TextEvent:
    """A running request produced text."""

    request_id: int
    label: str
    delta: str
    num_tokens: int
    """Tokens generated so far."""
    finished: bool
    time_s: float


@dataclass(frozen=True, slots=True)
class ControlEvent:
    """An operator or a drill changed the running engine."""

    action: str
    detail: dict[str, Any]
    table_version: int
    time_s: float


Event = StartEvent | StepEvent | RequestEvent | TextEvent | ControlEvent


class Sink(Protocol):
    """Somebody who listens. `enabled` is read once per step: False costs the engine nothing."""

    @property
    def enabled(self) -> bool:
        """Whether events should be built at all."""

    def emit(self, event: Event) -> None:
        """Take one event; must not block."""


class NullSink:
    """Listens to nothing; the engine then builds no events."""

    enabled = False

    def emit(self, event: Event) -> None:
        """Drop the event."""


@dataclass(frozen=True, slots=True)
class Tee:
    """Hands each event to several sinks in turn."""

    sinks: Sequence[Sink] = field(default_factory=tuple)

    @property
    def enabled(self) -> bool:
        """Whether any of the sinks listens."""
        return any(sink.enabled for sink in self.sinks)

    def emit(self, event: Event) -> None:
        """Pass the event to every sink that is enabled."""
        for sink in self.sinks:
            if sink.enabled:
                sink.emit(event)


class Filtered:
    """Hands on what one function leaves of each event; None leaves nothing."""

    def __init__(self, sink: Sink, left: Callable[[Event], Event | None]) -> None:
        self._sink, self._left = sink, left

    @property
    def enabled(self) -> bool:
        """Whether the sink behind listens."""
        return self._sink.enabled

    def emit(self, event: Event) -> None:
        """Hand on what is left of an event."""
        if (left := self._left(event)) is not None:
            self._sink.emit(left)
