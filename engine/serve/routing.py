"""How the tokens of a request were routed, for the answer's field `routing`.

A sink on the engine's thread that keeps rows only of the requests that asked, and forgets them when
the request is handed out. Prompt tokens that the KV cache held went through no expert, so their
rows say null, and -1 in the encodings.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.config import ModelConfig
from engine.events import CAUSES, Event, Float32, Int16, Int32, StepEvent
from engine.runtime.results import Completion
from engine.serve.encodings import to_int32, to_npy

BALANCE_FORMULA = "mean over layers of max(expert_counts) / mean(expert_counts); 1 is even"
NOTE = (
    "The first {} prompt tokens were not computed: the KV cache held them, from a request with the "
    "same beginning. No expert was chosen for them, so theirs are null, and -1 in the encodings."
)
_ACCEPTED = CAUSES.index("accepted")


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request wants to be told."""

    layers: tuple[int, ...]
    """Indices along the axis of MoE layers."""
    tokens: bool = True
    encodings: bool = False


@dataclass(slots=True)
class _Rows:
    """What was seen of one request."""

    wish: Wish
    positions: list[Int32] = field(default_factory=list)
    token_ids: list[Int32] = field(default_factory=list)
    experts: list[Int16] = field(default_factory=list)
    weights: list[Float32] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)
    extra: int = 0
    duration_ms: float = 0.0
    deciding_ms: float = 0.0


class RoutingCollector:
    """Keeps the rows of the requests that asked; used on the engine's thread alone."""

    enabled = True

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self._wanted: dict[int, _Rows] = {}

    def want(self, request_id: int, wish: Wish) -> None:
        """Keep the rows of a request from now on."""
        self._wanted[request_id] = _Rows(wish)

    def forget(self, request_id: int) -> None:
        """Keep no more of it."""
        self._wanted.pop(request_id, None)

    def emit(self, event: Event) -> None:
        """Take the wanted rows of a step."""
        if not self._wanted or not isinstance(event, StepEvent):
            return
        for request_id in np.unique(event.request_ids).tolist():
            if (rows := self._wanted.get(request_id)) is not None:
                _keep(rows, event, event.request_ids == request_id)

    def take(self, done: Completion) -> dict[str, Any] | None:
        """Return the report of a request that has ended, and forget it; None if nobody asked."""
        rows = self._wanted.pop(done.request_id, None)
        if rows is None:
            return None
        return _report(rows, done.prompt_token_ids[: done.reused_tokens], self._model)


def _keep(rows: _Rows, step: StepEvent, mine: npt.NDArray[np.bool_]) -> None:
    first = mine & (step.causes == _ACCEPTED)
    rows.positions.append(step.positions[first])
    rows.token_ids.append(step.token_ids[first])
    rows.experts.append(step.topk_ids[first])
    rows.weights.append(step.topk_weights[first][:, list(rows.wish.layers)])
    rows.versions.add(step.table_version)
    rows.extra += int(mine.sum() - first.sum())
    rows.duration_ms += step.duration_ms
    rows.deciding_ms += step.overhead_share * step.duration_ms


def _report(rows: _Rows, reused: tuple[int, ...], model: ModelConfig) -> dict[str, Any]:
    layers = list(rows.wish.layers)
    shape = (0, len(model.moe_layers), model.top_k)
    ids_TLK = np.concatenate([np.zeros(shape, np.int16), *rows.experts])
    order = np.argsort(np.concatenate([np.zeros(0, np.int32), *rows.positions]), kind="stable")
    ids_TLK = ids_TLK[order]
    chosen_TLK = ids_TLK[:, layers]
    report: dict[str, Any] = {
        "layers": [model.moe_layers[layer] for layer in layers],
        "experts": model.num_experts,
        "top_k": model.top_k,
        "summary": _summary(rows, chosen_TLK, model.num_experts) | {"reused_rows": len(reused)},
    }
    if reused:
        report["note"] = NOTE.format(len(reused))
    if rows.wish.tokens:
        empty = np.zeros((0, len(layers), model.top_k), np.float32)
        weights_TLK = np.concatenate([empty, *rows.weights])[order]
        token_ids = np.concatenate([np.zeros(0, np.int32), *rows.token_ids])[order]
        report["tokens"] = [
            {"index": index, "id": token, "experts": None, "weights": None}
            for index, token in enumerate(reused)
        ] + [
            {"index": index, "id": token, "experts": experts, "weights": weights}
            for index, (token, experts, weights) in enumerate(
                zip(
                    token_ids.tolist(),
                    chosen_TLK.tolist(),
                    weights_TLK.astype(np.float64).round(6).tolist(),
                    strict=True,
                ),
                len(reused),
            )
        ]
    if rows.wish.encodings:
        none_TLK = np.full((len(reused), *shape[1:]), -1, np.int16)
        ids_TLK = np.concatenate([none_TLK, ids_TLK])
        report["encodings"] = {
            "npy": to_npy(ids_TLK, model.num_experts),
            "int32": to_int32(ids_TLK, model.num_experts),
        }
    return report


def _summary(rows: _Rows, chosen_TLK: Int16, num_experts: int) -> dict[str, Any]:
    counts_LE = np.stack(
        [
            np.bincount(chosen_TL[chosen_TL >= 0].ravel(), minlength=num_experts)
            for chosen_TL in chosen_TLK.swapaxes(0, 1)
        ]
        or [np.zeros(num_experts, np.int64)]
    )
    means_L = counts_LE.mean(axis=1)
    even = float((counts_LE.max(axis=1) / means_L).mean()) if means_L.all() else None
    return {
        "rows": len(chosen_TLK),
        "extra_rows": rows.extra,
        "expert_counts": counts_LE.tolist(),
        "balance": {"value": even, "formula": BALANCE_FORMULA},
        "table_version": max(rows.versions, default=None),
        "overhead_share": rows.deciding_ms / rows.duration_ms if rows.duration_ms else 0.0,
    }
