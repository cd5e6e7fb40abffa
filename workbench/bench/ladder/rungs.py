"""The rungs of the ladder, in words and as settings, and how a rung's steps become its row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One way to run the same traffic."""

    name: str
    mode: str
    """One of `engine.config.EXCHANGES`."""
    what: str
    """In words."""
    replicas: bool = False
    smoothing: bool = False


RUNGS = (
    Rung(
        name="request-level",
        mode="request",
        what="each request's rows are exchanged and computed on their own, request after request",
    ),
    Rung(
        name="token naive",
        mode="naive",
        what="rows of all requests at once, one message for each token and expert",
    ),
    Rung(
        name="token grouped",
        mode="grouped",
        what="rows of all requests batched by destination, one packet for each peer; against "
        "request-level this is what batching across requests is worth",
    ),
    Rung(
        name="token overlapped",
        mode="overlapped",
        what="grouped, in two buffers: one half travels while the other computes",
    ),
    Rung(
        name="+ replicas",
        mode="overlapped",
        replicas=True,
        what="overlapped, and every rank has room for one expert more: a copy of a hot one",
    ),
    Rung(
        name="+ smoothing",
        mode="overlapped",
        replicas=True,
        smoothing=True,
        what="and a token leans towards the experts of the token before it; that changes which "
        "experts are chosen, so another text is right here",
    ),
)
CONTROL = Rung(
    name="dense control",
    mode="grouped",
    what="a dense model, against its own request-level run: no experts, nothing to route, "
    "nothing to win",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFigures:
    """What one step on G ranks took, measured or modelled."""

    step_ms: float
    comm_ms: float
    """Of it, moving rows and waiting for them; see the module that fills this."""
    messages: int
    num_bytes: int
    compute_ms_G: Float
    """Time each rank spent otherwise."""
    busiest_rows: float
    """Rows of the busiest rank, summed over layers."""
    mean_rows: float
    """Rows of the mean rank, summed over layers."""


def row(
    name: str,
    steps: Sequence[StepFigures],
    *,
    throughput: float,
    same_output: bool | None,
    label: str,
) -> dict[str, Any]:
    """Return one row of the report.

    Steps of 4 and 6 ms with 1 and 2 ms of communication have a `comm_share` of 3/10 and `comm_ms`
    1.5, the mean.

    Args:
        name: of the rung.
        steps: at least one.
        throughput: normalised to request-level.
        same_output: whether its tokens are those of request-level; None where nothing is computed.
        label: `measured` or `modelled`.
    """
    took = np.array([step.step_ms for step in steps])
    comm = np.array([step.comm_ms for step in steps])
    compute_G = np.sum([step.compute_ms_G for step in steps], axis=0)
    return {
        "name": name,
        "throughput_normalised": round(throughput, 3),
        "comm_share": round(float(comm.sum() / took.sum()), 4),
        "messages_per_step": round(float(np.mean([step.messages for step in steps])), 1),
        "bytes_per_step": round(float(np.mean([step.num_bytes for step in steps]))),
        "comm_ms": round(float(comm.mean()), 3),
        "step_p50_ms": round(float(np.percentile(took, 50)), 3),
        "step_p99_ms": round(float(np.percentile(took, 99)), 3),
        "utilisation": [round(float(share), 4) for share in compute_G / took.sum()],
        "max_over_mean_load": round(_imbalance(steps), 4),
        "same_output": same_output,
        "label": label,
    }


def layer_rows(ranks_TLK: Int, homes_T: Int, num_ranks: int) -> Int:
    """Count (L, G) the rows each rank gets in each layer; a dense model's stay at home, L = 1.

    Two tokens at home on ranks 0 and 1 that both use ranks 0 and 1 in one layer: ``[[2, 2]]``.
    """
    if not ranks_TLK.shape[1]:
        return np.bincount(homes_T, minlength=num_ranks)[None]
    layers = [ranks_TLK[:, layer].ravel() for layer in range(ranks_TLK.shape[1])]
    return np.stack([np.bincount(ranks, minlength=num_ranks) for ranks in layers])


def _imbalance(steps: Sequence[StepFigures]) -> float:
    """Return busiest over mean rows, each summed over steps and layers; 1 is even."""
    mean = sum(step.mean_rows for step in steps)
    return sum(step.busiest_rows for step in steps) / mean if mean else 1.0
