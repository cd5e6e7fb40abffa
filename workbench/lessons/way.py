"""A token's way through one MoE layer: each line of the code beside what it did to this token.

The numbers are the recorded ones; the lines are those of `engine/model/moe.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from engine.events import Decision
from workbench.lessons.note import Note, code, table
from workbench.lessons.small import Run

LINES = (
    ("gate", "logits_TE = self.gate.logits(x_TD)"),
    ("select", "chosen, bonus_TE = self._select(logits_TE, step)"),
    ("place", "phy_ids_TK = self.placer.place(chosen.topk_ids_TK, step.homes_T, table, layer)"),
    ("dispatch", "flights = self.dispatcher.dispatch(x_TD, phy_ids_TK, table, layer, mark)"),
    ("experts", "out_RD, units = self._run(rows_RD, handle, x_TD, step)"),
    ("combine", "returns.append(self.dispatcher.combine(out_RD, weights_TK, handle, table))"),
    ("record", "record = LayerRecord(GateOutput(logits_TE, chosen), phy_ids_TK, units=units)"),
)
"""Stage and line, in the order a token meets them."""


def seven_lines(run: Run, position: int, layer: int) -> Note:
    """Show the seven lines with the numbers of one token of a run's first request.

    Raises:
        RequestError: the token's decision in that layer was not recorded.
    """
    decision = run.decision(position, layer)
    step = _step_of(run, decision)
    told = (
        _gate(decision),
        _select(decision),
        _place(decision),
        _dispatch(run, decision, step),
        _experts(run, decision, step, layer),
        _combine(decision),
        f"what you read here: step {run.trace.columns['steps/step'][step]}, "
        f"routing table version {decision.table_version}",
    )
    head = (
        f"Token {position}, {code(run.tokens[position])}, in layer {layer} "
        f"(home: device {_home(run, decision)})\n\n"
    )
    rows = [
        (str(number), f"**{stage}**<br>`{line}`", what)
        for number, ((stage, line), what) in enumerate(zip(LINES, told, strict=True), start=1)
    ]
    return Note(head + table(("", "line", "what it did to this token"), rows))


def _gate(decision: Decision) -> str:
    logits = "  ".join(f"{logit:.2f}" for logit in decision.logits)
    return f"{len(decision.logits)} logits, one for each expert: {logits}"


def _select(decision: Decision) -> str:
    chosen = _words(
        f"expert **{expert}** (weight {weight:.3f})" for expert, weight in _pairs(decision)
    )
    if decision.runner_up < 0:
        return f"{chosen}; no expert was left over"
    return f"{chosen}; expert {decision.runner_up} came next, {decision.margin:.3f} behind"


def _place(decision: Decision) -> str:
    return "; ".join(
        f"expert {expert} → physical {physical}, {reason}"
        for expert, physical, reason in zip(
            decision.topk_ids, decision.physical, decision.reasons, strict=True
        )
    )


def _dispatch(run: Run, decision: Decision, step: int) -> str:
    first, last = run.trace.columns["steps/row_start"][step : step + 2]
    rows, slots = int(last - first), len(decision.topk_ids)
    home = _home(run, decision)
    away = sum(int(device) != home for device in decision.devices)
    return (
        f"{slots} of the step's {rows * slots} slots ({_count(rows, 'row')} × {slots}) are this "
        f"token's, sorted by expert; "
        f"{away} of them leave{'s' if away == 1 else ''} device {home}"
    )


def _experts(run: Run, decision: Decision, step: int, layer: int) -> str:
    first, last = run.trace.columns["steps/row_start"][step : step + 2]
    place = run.trace.start.moe_layers.index(layer)
    ids_TK = run.trace.columns["rows/topk_ids"][first:last, place]
    return (
        _words(
            f"expert {expert} runs {_count(int((ids_TK == expert).sum()), 'slot')}"
            for expert in decision.topk_ids
        )
        + ", this token's among them"
    )


def _combine(decision: Decision) -> str:
    return " + ".join(
        f"{weight:.3f} × output of expert {expert}" for expert, weight in _pairs(decision)
    )


def _pairs(decision: Decision) -> Iterable[tuple[int, float]]:
    return zip(decision.topk_ids.tolist(), decision.topk_weights.tolist(), strict=True)


def _row_of(run: Run, decision: Decision) -> int:
    columns = run.trace.columns
    same = (columns["rows/request_ids"] == decision.request_id) & (
        columns["rows/positions"] == decision.position
    )
    return int(np.flatnonzero(same)[0])


def _step_of(run: Run, decision: Decision) -> int:
    return int(run.trace.row_steps[_row_of(run, decision)])


def _home(run: Run, decision: Decision) -> int:
    return int(run.trace.columns["rows/homes"][_row_of(run, decision)])


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _words(parts: Iterable[str]) -> str:
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last
