"""The JSON reports of `generate` and `explain`, and the words for people made from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.events import Decision
from workbench.output import count

if TYPE_CHECKING:
    from engine import Completion, Engine
    from workbench.tally import Tally

BALANCE_FORMULA = (
    "mean over MoE layers of max(expert_counts) / mean(expert_counts); 1 is perfectly even"
)


def balance(expert_counts_LE: npt.NDArray[np.int64]) -> float | None:
    """Return the balance by `BALANCE_FORMULA`, None when no expert ran.

    Example: one layer with counts [6, 2, 0, 0] gives 6 / 2 = 3.
    """
    counts_LE = np.asarray(expert_counts_LE, np.float64)
    if counts_LE.size == 0 or not counts_LE.sum():
        return None
    return float((counts_LE.max(-1) / counts_LE.mean(-1)).mean())


def generation(
    completion: Completion, engine: Engine, tally: Tally, seconds: float
) -> dict[str, Any]:
    """Return what one generation did.

    `rows` counts each accepted token's pass once; every layer of `expert_counts` sums to
    rows x top_k. Rows run again or thrown away stand in `extra_rows` by cause.
    """
    shape = engine.model_config
    counts_LE = tally.expert_counts_LE
    num_tokens = len(completion.token_ids)
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "prompt_token_ids": list(completion.prompt_token_ids),
        "prompt_tokens": len(completion.prompt_token_ids),
        "completion_tokens": num_tokens,
        "finish_reason": completion.finish_reason,
        "tokens_per_second": round(num_tokens / seconds, 3) if seconds > 0 else 0.0,
        "logits_sha256": completion.logits_sha256,
        "precision": engine.config.scheme,
        "draft": drafting(completion, engine),
        "routing": {
            "layers": len(counts_LE),
            "experts": shape.num_experts,
            "top_k": shape.top_k if len(counts_LE) else 0,
            "rows": tally.rows["accepted"],
            "extra_rows": tally.extra_rows,
            "expert_counts": counts_LE.tolist(),
            "table_version": tally.table_version,
            "overhead_share": round(tally.overhead_share, 6),
            "dropped_slots": tally.dropped,
            "units": {name: tally.units[name] for name in ("all", "int8", "failed")},
            "balance": {"value": balance(counts_LE), "formula": BALANCE_FORMULA},
        },
    }


def drafting(completion: Completion, engine: Engine) -> dict[str, Any] | None:
    """Return how one request's draft fared; None without a draft.

    `silent` says why nothing could be proposed, where that is so.
    """
    from pathlib import Path

    from engine.routing.speculation import DEFINITION

    figures = completion.draft
    if figures is None:
        return None
    return {
        "model": Path(engine.config.draft or "").name,
        "proposed": figures.proposed,
        "accepted": figures.accepted,
        "steps": figures.steps,
        "passes": figures.passes,
        "acceptance": figures.acceptance,
        "tokens_per_step": figures.tokens_per_step,
        "silent": _silent(engine),
        "switched": [{"at": at, "on": on} for at, on in completion.draft_switched],
        "definition": DEFINITION,
    }


def _silent(engine: Engine) -> str | None:
    """Say what keeps a draft from proposing: a row's experts depend on the rows before it then."""
    policy = engine.control.policy
    if policy.smoothing:
        return "silent under smoothing"
    return "silent under a capacity factor" if policy.capacity_factor is not None else None


def generation_summary(report: dict[str, Any], seconds: float) -> str:
    """Return a generation's report in two lines of text."""
    routing = report["routing"]
    lines = [
        f"{count(report['completion_tokens'], 'token')} after the prompt in {seconds:.2f} s "
        f"({report['tokens_per_second']:.1f} tokens/s), ended by {report['finish_reason']}"
    ]
    if draft := report["draft"]:
        lines.append(_draft_line(draft))
    if routing["layers"]:
        counts_LE = np.asarray(routing["expert_counts"])
        layer, expert = np.unravel_index(counts_LE.argmax(), counts_LE.shape)
        share = counts_LE[layer, expert] / max(1, counts_LE[layer].sum())
        lines.append(
            f"{count(routing['rows'], 'row')}{_extra(routing['extra_rows'])} x "
            f"{count(routing['layers'], 'MoE layer')} x top-{routing['top_k']}: "
            f"busiest is expert {expert} of layer {layer} with {share:.0%} of its layer; "
            f"routing overhead {routing['overhead_share']:.1%} of step time"
        )
        if num_units := (units := routing["units"])["all"]:
            lines.append(
                f"{units['int8'] / num_units:.0%} of {count(num_units, 'unit')} of rows in INT8, "
                f"{units['failed']} of them run again in full precision"
            )
        if lost := sum(routing["dropped_slots"]):
            lines.append(
                f"{count(lost, '(token, expert) slot')} dropped for lack of room, by MoE layer "
                f"{routing['dropped_slots']}"
            )
        lines.append(f"balance {routing['balance']['value']:.2f}  ({BALANCE_FORMULA})")
    return "\n".join(lines)


EXTRA = {
    "preemption": "run again after a preemption",
    "recovery": "run again after a recovery",
    "rejected_draft": "thrown away, of rejected drafts",
    "precision": "of experts run again in full precision",
}
"""What became of rows beside those of accepted tokens, by cause."""


def _extra(rows: dict[str, int]) -> str:
    """Say which rows ran beside those of accepted tokens; nothing without any."""
    parts = [f"+{number} {EXTRA[cause]}" for cause, number in rows.items() if number]
    return f" ({', '.join(parts)})" if parts else ""


def _draft_line(draft: dict[str, Any]) -> str:
    """Say in a line, and its definition, how a draft fared."""
    rate, per_step = draft["acceptance"], draft["tokens_per_step"]
    if rate is None:
        why = f", {draft['silent']}" if draft["silent"] else ""
        return f"draft {draft['model']}: no token proposed{why}"
    accepted = f"{rate:.0%} of {draft['proposed']}"
    off = [str(line["at"]) for line in draft["switched"] if not line["on"]]
    after = f"; switched off after {', '.join(off)} tokens" if off else ""
    return (
        f"draft {draft['model']}: {accepted} proposals accepted, "
        f"{per_step or 1:.2f} tokens per target step{after}  ({draft['definition']})"
    )


def explanation(decision: Decision, *, index: int, text: str) -> dict[str, Any]:
    """Return one decision as the step recorded it.

    `bias` and `smoothing` were added to the logits, `shut` is 1 outside the groups kept, `capacity`
    and `unit` are -1 where there is none, `stage_ms` is for all rows of the step in this layer.
    """
    return {
        "token": {"index": index, "id": decision.token_id, "text": text},
        "layer": decision.layer,
        "logits": decision.logits,
        "scores": decision.scores,
        "topk_ids": decision.topk_ids,
        "topk_weights": decision.topk_weights,
        "runner_up": decision.runner_up,
        "margin": decision.margin,
        "placements": [
            {"expert": int(expert), "physical": int(physical), "device": int(device), "reason": why}
            for expert, physical, device, why in zip(
                decision.topk_ids,
                decision.physical,
                decision.devices,
                decision.reasons,
                strict=True,
            )
        ],
        "table_version": decision.table_version,
        "format": decision.format,
        "format_reason": decision.format_reason,
        "unit": decision.unit,
        "bias": decision.bias,
        "smoothing": decision.smoothing,
        "shut": decision.shut,
        "capacity": decision.capacity,
        "model": decision.model,
        "verdict": decision.verdict,
        "looked_up": list(decision.looked_up),
        "stage_ms": {stage: round(ms, 6) for stage, ms in decision.stage_ms.items()},
        "source": list(decision.source),
    }
