"""One step's rows, laid out for the layers: from spans of sequences to a `StepContext`.

A `Span` is all that whoever runs it needs to know of a sequence, and nothing that lives on: it
travels to another process as it is. Called by `engine.cluster.rank`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.config import SamplingParams
from engine.events import Int64
from engine.kernels.attention import Segment, plan_attention
from engine.model.step import HostRows, StageClock, StepContext
from engine.routing.policy import LayerPolicy
from engine.routing.table import RoutingTable


@dataclass(slots=True)
class Draw:
    """How the token after a span is chosen."""

    params: SamplingParams
    seed: int
    position: int
    """The position the new token will have."""


@dataclass(slots=True)
class Span:
    """Consecutive tokens of one sequence in a step."""

    request_id: int
    home: int
    """The device whose attention owns the sequence."""
    start: int
    """Position of the first token in its sequence."""
    token_ids: list[int]
    blocks: tuple[int, ...]
    """The sequence's cache blocks, enough for start + len(token_ids) tokens."""
    draw: Draw | None = None
    """Set when the span reaches the sequence's end, so that a next token follows."""
    watched: tuple[int, ...] = ()
    """Positions within the span whose whole decision is recorded."""
    ages_LE: Int64 | None = None
    """While smoothing is on: how many tokens before `start` each expert was last used, where that
    is known."""
    num_drafts: int = 0
    """Of the tokens, how many at the end are proposals; each of them draws a token too."""


def lay_out(
    spans: Sequence[Span],
    block_size: int,
    table: RoutingTable,
    policies: tuple[LayerPolicy | None, ...],
    clock: StageClock,
    device: torch.device,
    *,
    record: bool,
) -> StepContext:
    """Put the spans' tokens row by row into one batch; no spans give a batch of 0 rows."""
    columns: tuple[list[int], ...] = ([], [], [], [], [])
    token_ids, positions, slots, homes, request_ids = columns
    segments: list[Segment] = []
    for span in spans:
        count, blocks = len(span.token_ids), span.blocks
        at = range(span.start, span.start + count)
        segments.append(Segment(len(token_ids), count, span.start, blocks))
        token_ids += span.token_ids
        positions += at
        slots += [blocks[place // block_size] * block_size + place % block_size for place in at]
        homes += [span.home] * count
        request_ids += [span.request_id] * count
    host = HostRows(*np.array(columns, dtype=np.int64))
    return StepContext(
        host=host,
        token_ids_T=torch.from_numpy(host.token_ids).to(device),
        positions_T=torch.from_numpy(host.positions).to(device),
        slots_T=torch.from_numpy(host.slots).to(device),
        homes_T=torch.from_numpy(host.homes).to(device),
        plan=plan_attention(segments, block_size, device),
        table=table,
        policies=policies,
        clock=clock,
        records=[] if record else None,
    )
