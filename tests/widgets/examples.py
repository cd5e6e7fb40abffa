"""Events and tokens for the widgets to show, invented but in the shape of real ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine.events import RequestEvent
from workbench.trace import Trace
from workbench.trace.synthetic import decision, start_event, step_event

PARTS = (b"", b"Der", b" R", b"outer", b" ", b"\xf0\x9f", b"\xa6\x8a", b"\n",
         b"und", b" so", b" weiter", b".")  # fmt: skip
SOURCE = tuple(
    f"engine/{name}.py:{line}"
    for line, name in enumerate(
        ("routing/gate", "kernels/topk", "routing/device", "exchange/dispatch", "model/moe",
         "kernels/combine"), start=10
    )
)  # fmt: skip


class PartTokens:
    """Knows the twelve tokens of `long_request`."""

    def token_bytes(self, token_id: int) -> bytes:
        return PARTS[token_id]

    def token(self, token_id: int) -> str:
        return PARTS[token_id].decode("utf-8", "replace") or "<|bos|>"


def long_request(*, layers: int = 4, experts: int = 8, top_k: int = 2, full: int = 2) -> Trace:
    """Return one request of 8 prompt and 4 generated tokens, token `full` recorded in full."""
    start = start_event(layers=layers, experts=experts, top_k=top_k)
    rng = np.random.default_rng(3)
    steps = []
    for at in range(len(PARTS)):
        event = step_event(start, at, 1)
        event.token_ids = np.array([at], np.int32)
        if at == full:
            event.decisions = tuple(_decided(start, event, layer, rng) for layer in range(layers))
        steps.append((at + 1, event))
    notes = (
        (0, RequestEvent(0, "added", "de", start.time_s, prompt_token_ids=tuple(range(8)))),
        (99, RequestEvent(0, "finished", "de", start.time_s + 1, finish_reason="length")),
    )
    return Trace.from_events(start, steps, notes)


def _decided(start, event, layer, rng):
    """Return a decision that agrees with its row, as the engine's do."""
    made = decision(start, request_id=0, position=int(event.positions[0]),
                    token_id=int(event.token_ids[0]), rng=rng)  # fmt: skip
    event.topk_ids[0, layer] = event.phy_ids[0, layer] = made.topk_ids
    event.topk_weights[0, layer] = made.topk_weights
    event.margins[0, layer] = made.margin
    return replace(made, layer=layer, source=SOURCE)
