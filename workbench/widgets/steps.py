"""What the token stepper shows: one request's tokens, and each one's way through each MoE layer.

Nothing is computed that the step did not record, except `kept`: how many of a token's experts the
token before it used too. Logits, scores and reasons are there for tokens that were watched
(`Engine.add(…, watch=…)`); of the others the step keeps the compact record, and `full` is None.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import TraceError
from engine.events import CAUSES, Decision
from workbench.trace import Trace
from workbench.widgets.token_text import Tokens, readable

STAGES = ("gate", "select", "place", "experts", "combine")
"""The stages of one layer, in the order a token meets them; `experts` includes the dispatch."""
SOURCES = {"gate": (0,), "select": (1,), "place": (2,), "experts": (3, 4), "combine": (5,)}
"""Which lines of `Decision.source` belong to a stage."""
MAX_TOKENS = 512
"""Longer requests are shown from their beginning up to here."""

State = dict[str, Any]


def stepper_state(
    trace: Trace,
    request_id: int | None = None,
    *,
    tokenizer: Tokens | None = None,
    max_tokens: int = MAX_TOKENS,
) -> State:
    """Return one request of a trace as the token stepper reads it: plain JSON values.

    Args:
        trace: what a recorder kept.
        request_id: None takes the first request with full decisions, else the first with rows.
        tokenizer: makes ids readable; None shows ids.
        max_tokens: how many tokens are shown, from the first recorded one.

    Returns:
        `request`, `engine`, `stages`, `note`, and `tokens`: each with `position`, `id`, `text`,
        `kind`, `note`, `breaks`, `generated`, `home`, `cause`, `runs`, `step`, `table_version`,
        and `layers`: for each MoE layer `topk_ids`, `topk_weights`, `physical`, `devices` (None
        when a later table's are not known), `margin` (None without a runner-up), `kept` (None for
        the first token), and `full`: None, or `logits`, `scores`, `runner_up`, `reasons`, `format`,
        `source` by stage, and how scores came of logits and weights of scores (`scored`,
        `weighed`; empty where the recorded numbers fit no rule). A number that is not finite is
        None.

    Raises:
        TraceError: the trace holds no row of that request.
    """
    if request_id is None:
        request_id = _first_request(trace)
    rows = _rows_by_position(trace, request_id)
    shown = rows[:max_tokens]
    texts = readable([int(trace.columns["rows/token_ids"][row]) for row, _ in shown], tokenizer)
    decisions = _decisions(trace, request_id)
    prompt, label, ended = _request(trace, request_id)
    tokens: list[dict[str, Any]] = []
    before: tuple[int, int] | None = None
    for (row, runs), text in zip(shown, texts, strict=True):
        position = int(trace.columns["rows/positions"][row])
        neighbour = before[1] if before is not None and before[0] == position - 1 else None
        tokens.append(
            {
                "position": position,
                **text._asdict(),
                "generated": position >= prompt if prompt else None,
                "runs": runs,
                **_token(trace, row, neighbour, decisions.get(position, {})),
            }
        )
        before = position, row
    return {
        "version": 1,
        "request": {"id": int(request_id), "label": label, "ended": ended},
        "engine": _engine(trace),
        "stages": list(STAGES),
        "note": "" if len(rows) <= max_tokens else f"the first {max_tokens} of {len(rows)} tokens",
        "tokens": tokens,
    }


def state_json(state: State) -> str:
    """Return a state as the text the widget takes."""
    return json.dumps(state, allow_nan=False, separators=(",", ":"), ensure_ascii=False)


def request_ids(trace: Trace) -> list[int]:
    """Return the requests with rows in the trace, in ascending order."""
    return [int(found) for found in np.unique(trace.columns["rows/request_ids"])]


def _first_request(trace: Trace) -> int:
    if trace.decisions:
        return trace.decisions[0].request_id
    known = request_ids(trace)
    if not known:
        raise TraceError("the trace holds no rows; record a request first.")
    return known[0]


def _rows_by_position(trace: Trace, request_id: int) -> list[tuple[int, int]]:
    """Return, by position, the row that counted and how often the position ran."""
    rows = trace.rows_of(request_id)
    if not len(rows):
        known = request_ids(trace)
        there = ", ".join(map(str, known[:8])) + (", …" if len(known) > 8 else "")
        raise TraceError(
            f"the trace holds no rows of request {request_id}; it has {there or 'none at all'}."
        )
    positions, causes = trace.columns["rows/positions"], trace.columns["rows/causes"]
    best: dict[int, int] = {}
    runs: dict[int, int] = {}
    for row in rows.tolist():
        at = int(positions[row])
        runs[at] = runs.get(at, 0) + 1
        if at not in best or (causes[best[at]] != 0 and causes[row] == 0):
            best[at] = row
    return [(best[at], runs[at]) for at in sorted(best)]


def _decisions(trace: Trace, request_id: int) -> dict[int, dict[int, Decision]]:
    """Return position -> layer -> decision, the first of each."""
    found: dict[int, dict[int, Decision]] = {}
    for decision in trace.decisions:
        if decision.request_id == request_id:
            found.setdefault(decision.position, {}).setdefault(decision.layer, decision)
    return found


def _request(trace: Trace, request_id: int) -> tuple[int, str, str]:
    """Return the prompt's length (0 unknown), the label and how the request ended."""
    prompt, label, ended = 0, "", ""
    for event in trace.requests:
        if event.request_id == request_id:
            label = event.label
            prompt = prompt or len(event.prompt_token_ids)
            ended = event.finish_reason or ended
    return prompt, label, ended


def _engine(trace: Trace) -> dict[str, Any]:
    start = trace.start
    return {
        "model": start.model,
        "layers": list(start.moe_layers),
        "num_experts": start.num_experts,
        "top_k": start.top_k,
        "num_devices": start.num_devices,
        "dtype": start.dtype,
    }


def _token(
    trace: Trace, row: int, neighbour: int | None, decisions: dict[int, Decision]
) -> dict[str, Any]:
    """Return what one row holds of its token; `neighbour` is the row of the token before."""
    columns, step = trace.columns, _step(trace, row)
    return {
        "id": int(columns["rows/token_ids"][row]),
        "home": int(columns["rows/homes"][row]),
        "cause": CAUSES[columns["rows/causes"][row]],
        **step,
        "layers": _layers(trace, row, step["table_version"], neighbour, decisions),
    }


def _step(trace: Trace, row: int) -> dict[str, int]:
    index = int(np.searchsorted(trace.columns["steps/row_start"], row, side="right")) - 1
    return {
        "step": int(trace.columns["steps/step"][index]),
        "table_version": int(trace.columns["steps/table_version"][index]),
    }


def _layers(
    trace: Trace,
    row: int,
    version: int,
    neighbour: int | None,
    decisions: dict[int, Decision],
) -> list[dict[str, Any]]:
    columns = trace.columns
    ids_LK, phy_LK = columns["rows/topk_ids"][row], columns["rows/phy_ids"][row]
    before_LK = None if neighbour is None else columns["rows/topk_ids"][neighbour]
    layers = []
    for layer, ids_K in enumerate(ids_LK):
        full = decisions.get(trace.start.moe_layers[layer])
        if full is not None:
            devices: list[int] | None = full.devices.tolist()
        else:
            devices = _devices(trace, version, phy_LK[layer].tolist())
        layers.append(
            {
                "topk_ids": ids_K.tolist(),
                "topk_weights": _numbers(columns["rows/topk_weights"][row, layer]),
                "physical": phy_LK[layer].tolist(),
                "devices": devices,
                "margin": _number(full.margin if full else columns["rows/margins"][row, layer]),
                "kept": None if before_LK is None else _kept(ids_K, before_LK[layer]),
                "full": None if full is None else _full(full),
            }
        )
    return layers


def _devices(trace: Trace, version: int, physical: Sequence[int]) -> list[int] | None:
    """Return the devices of physical experts under the table the engine started with."""
    where = trace.start.rank_of_phy
    if version != trace.start.table_version or max(physical, default=-1) >= len(where):
        return None
    return [where[phy] if phy >= 0 else -1 for phy in physical]


def _kept(ids_K: npt.NDArray[Any], before_K: npt.NDArray[Any]) -> int:
    return len(set(ids_K[ids_K >= 0].tolist()) & set(before_K.tolist()))


def _full(decision: Decision) -> dict[str, Any]:
    source = decision.source
    return {
        "logits": _numbers(decision.logits),
        "scores": _numbers(decision.scores),
        "scored": _scored(decision),
        "weighed": _weighed(decision),
        "runner_up": decision.runner_up,
        "reasons": list(decision.reasons),
        "format": decision.format,
        "source": {
            stage: [source[at] for at in places if at < len(source)]
            for stage, places in SOURCES.items()
        },
    }


def _scored(decision: Decision) -> str:
    """Return `softmax` or `sigmoid` where that turns the logits into the scores, else nothing.

    Logits 1, 0 have the softmax 0.731, 0.269 and the sigmoids 0.731, 0.5.
    """
    logits = (decision.logits + decision.bias + decision.smoothing).astype(np.float64)
    if not np.isfinite(logits).all():
        return ""
    powers = np.exp(logits - logits.max())
    with np.errstate(over="ignore"):
        ways = {"softmax": powers / powers.sum(), "sigmoid": 1 / (1 + np.exp(-logits))}
    return _first_close(ways, decision.scores)


def _weighed(decision: Decision) -> str:
    """Return how the chosen scores became weights: `shares` of their sum, the `scores`, or nothing.

    Scores 0.5, 0.3 have the shares 0.625, 0.375.
    """
    there = decision.topk_ids >= 0
    scores = decision.scores[decision.topk_ids[there]].astype(np.float64)
    ways = {"shares": scores / (scores.sum() or np.nan), "scores": scores}
    return _first_close(ways, decision.topk_weights[there])


def _first_close(ways: dict[str, npt.NDArray[np.float64]], recorded: npt.NDArray[Any]) -> str:
    close = (name for name, found in ways.items() if np.allclose(found, recorded, atol=2e-4))
    return next(close, "")


def _numbers(values: npt.NDArray[Any]) -> list[float | None]:
    return [_number(value) for value in values]


def _number(value: Any) -> float | None:
    """Return a number with the fewest digits that still name its float32, None if not finite."""
    return float(str(np.float32(value))) if math.isfinite(value) else None
