"""`workbench explain`: the whole routing decision for one token in one layer, and what if."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench import paths
from workbench.grouped import grouped
from workbench.options import (
    SHOWN_DEVICES,
    AskedDtypeOption,
    CapacityOption,
    DeterministicOption,
    DevicesOption,
    DraftOptions,
    JsonOption,
    ModelOption,
    PolicyOptions,
    PrecisionOption,
    ThresholdsOption,
    open_engine,
)
from workbench.output import print_json

if TYPE_CHECKING:
    from engine import Engine
    from engine.events import Decision
    from workbench.policy import Policy
    from workbench.trace import Recorder

BAR_CELLS = 10


@grouped
def explain(
    *,
    text: Annotated[
        str | None, typer.Argument(help="The prompt; - reads it from stdin.", show_default=False)
    ] = None,
    token: Annotated[
        int,
        typer.Option(metavar="I", help="Which token; 0 is the prompt's first, new ones follow."),
    ],
    layer: Annotated[int, typer.Option(metavar="L", help="Which MoE layer; 0 is the first.")],
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", metavar="FILE", help="Read the prompt from it.")
    ] = None,
    devices: DevicesOption = SHOWN_DEVICES,
    model: ModelOption = paths.DEFAULT_MODEL,
    dtype: AskedDtypeOption = None,
    precision: PrecisionOption = "model",
    thresholds: ThresholdsOption = None,
    max_tokens: Annotated[int, typer.Option(help="New tokens to write after the prompt.")] = 0,
    drafts: DraftOptions,
    deterministic: DeterministicOption = False,
    asked_of_gate: PolicyOptions,
    capacity_factor: CapacityOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show why one token of TEXT went to its experts in one layer, as the step recorded it.

    With --force-experts, --ban-expert, --bias or --smoothing the decision is the one under that
    policy, beside the one without it, and what the model says comes next is compared: what if?
    """
    from workbench import report
    from workbench.prompts import read_prompt

    found = decide(
        read_prompt(text, prompt_file),
        token=token,
        layer=layer,
        max_tokens=max_tokens,
        policy=asked_of_gate.policy(),
        model=model,
        dtype=dtype,
        precision=precision,
        thresholds=thresholds,
        devices=devices,
        deterministic=deterministic,
        capacity_factor=capacity_factor,
        drafts=drafts,
    )
    decisions, token_text, compared = found
    result = report.explanation(decisions[-1], index=token, text=token_text)
    if compared is not None:
        plain = report.explanation(decisions[0], index=token, text=token_text)
        result["what_if"] = {"without": plain, **compared}
    if as_json:
        print_json(result)
    else:
        _show(result)


def decide(
    prompt: str, *, token: int, layer: int, max_tokens: int, policy: Policy, **engine_options: Any
) -> tuple[list[Decision], str, dict[str, Any] | None]:
    """Run the prompt and return the recorded decision, the token's text and what if.

    With a policy everything up to the token, or the end of the prompt, runs a second time under it:
    there are two decisions then.

    Raises:
        RequestError: there is no such token, or the model has no such MoE layer.
    """
    from workbench.policy import Policy
    from workbench.trace import Recorder
    from workbench.whatif import what_if

    recorder, compared = Recorder(), None
    token_ids = _token_ids(engine_options["model"], prompt, token, layer, max_tokens)
    with closing(open_engine(sink=recorder, **engine_options)) as engine:
        decision, written = _run(engine, recorder, token_ids, token, layer, max_tokens)
        found = [decision]
        if token >= len(token_ids):
            token_ids = [*token_ids, *written][: token + 1]
        if policy != Policy():
            compared = what_if(engine, token_ids, token, policy)
            policy.apply(engine)
            compared |= _asked(engine, layer)
            found.append(_run(engine, recorder, token_ids, token, layer, 0)[0])
        token_text = engine.tokenizer.token(token_ids[token])
    return found, token_text, compared


def _asked(engine: Engine, layer: int) -> dict[str, list[int]]:
    """Return which experts the policy in force bans and forces in one layer."""
    place, policy = engine.model_config.moe_layers.index(layer), engine.control.policy
    cells = {"banned": policy.banned, "forced": policy.forced}
    return {name: sorted(e for at, e in found if at == place) for name, found in cells.items()}


def _token_ids(model: str, prompt: str, token: int, layer: int, max_tokens: int) -> list[int]:
    """Return the prompt's tokens; refuse what the model's folder alone shows to be wrong.

    Raises:
        RequestError: there is no such token, or the model has no such MoE layer.
        CheckpointError: the folder is missing or damaged.
    """
    from engine.checkpoint.load import read_config
    from engine.errors import RequestError
    from engine.model.tokenizer import Tokenizer

    folder = paths.model_folder(model)
    moe_layers = read_config(folder).moe_layers
    if layer not in moe_layers:
        there = f"{moe_layers[0]} to {moe_layers[-1]}" if moe_layers else "none, it is dense"
        raise RequestError(f"layer ({layer}) must be a MoE layer; this model has {there}.")
    token_ids = Tokenizer(folder).encode(prompt)
    num_new = max(0, max_tokens - 1)  # the last new token is never run: nothing follows it
    if not 0 <= token < len(token_ids) + num_new:
        new = f" and {num_new} new ones are run" if num_new else ""
        raise RequestError(
            f"token ({token}) must lie between 0 and {len(token_ids) + num_new - 1}: "
            f"the prompt has {len(token_ids)} tokens{new}."
        )
    return token_ids


def _run(
    engine: Engine,
    recorder: Recorder,
    token_ids: list[int],
    token: int,
    layer: int,
    max_tokens: int,
) -> tuple[Decision, tuple[int, ...]]:
    """Run the prompt once and return the decision that its step recorded, and the new tokens.

    Where a draft was rejected at this place, the token that stands there in the end counts.
    """
    from engine import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    request_id = engine.add(token_ids, params, watch=(token,))
    (done,) = engine.finish([request_id])
    found = [
        d
        for d in recorder.trace().decisions
        if (d.request_id, d.position, d.layer) == (request_id, token, layer)
        and d.verdict != "rejected"
    ]
    assert len(found) == 1, f"{len(found)} decisions were recorded for one token in one layer"
    return found[0], done.token_ids


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    token = result["token"]
    where = {place["expert"]: place for place in result["placements"]}
    chosen = [int(e) for e in result["topk_ids"]]
    weight = dict(zip(chosen, (float(w) for w in result["topk_weights"]), strict=True))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("", "expert", "logit", "added", "score", "weight"):
        table.add_column(name, justify="left" if not name else "right")
    table.add_column("")
    asked = result.get("what_if", {"banned": (), "forced": ()})
    order = sorted(range(len(result["scores"])), key=lambda e: -float(result["scores"][e]))
    for expert in [*chosen, *(e for e in order if e not in chosen)]:
        is_next = expert == result["runner_up"]
        mark = "chosen" if expert in chosen else "next" if is_next else ""
        mark = next((name for name in ("banned", "forced") if expert in asked[name]), mark)
        added = float(result["bias"][expert]) + float(result["smoothing"][expert])
        table.add_row(
            mark,
            str(expert),
            f"{float(result['logits'][expert]):.4f}",
            f"{added:+.4f}" if added else "",
            f"{float(result['scores'][expert]):.4f}",
            f"{weight[expert]:.4f}" if expert in weight else "",
            Text("█" * round(BAR_CELLS * weight.get(expert, 0.0))),
            style="bold" if expert in chosen else None if is_next else "dim",
        )
    console = Console(highlight=False)
    head = f"Token {token['index']} {token['text']!r} (id {token['id']}) in layer {result['layer']}"
    how = f"{result['format']}, routing table {result['table_version']}"
    console.print(Text(f"{head}, {how}\n"))
    console.print(table)
    for expert, place in sorted(where.items(), key=lambda at: chosen.index(at[0])):
        lost = place["physical"] < 0
        runs = "does not run, " if lost else f"runs as physical {place['physical']}: "
        console.print(Text(f"\nExpert {expert} {runs}{place['reason']}."), end="")
    console.print()
    if result["runner_up"] >= 0:
        lead = f"the score by which the last chosen expert led expert {result['runner_up']}"
        console.print(Text(f"\nMargin {float(result['margin']):.4f}: {lead}."))
    for line in _circumstances(result):
        console.print(Text(line))
    console.print(Text("Decided in " + " → ".join(result["source"])))
    if "what_if" in result:
        _show_what_if(console, result["what_if"])


def _circumstances(result: dict[str, Any]) -> list[str]:
    """Say what else bore on the decision, in sentences; what is off is left out."""
    lines = []
    if result["capacity"] >= 0:
        lines.append(f"Capacity: each expert took at most {result['capacity']} rows of the step.")
    if result["format_reason"]:
        unit = f"unit {result['unit']}, " if result["unit"] >= 0 else ""
        lines.append(f"Format {result['format']}: {unit}{result['format_reason']}.")
    if result["model"] == "draft":
        lines.append(f"Proposed by the draft, {result['verdict']} by the target.")
    if result["looked_up"]:
        lines.append(f"Looked up instead of worked out: {', '.join(result['looked_up'])}.")
    times = ", ".join(f"{stage} {1e3 * ms:.0f}" for stage, ms in result["stage_ms"].items())
    lines.append(f"Microseconds of the layer, all rows of the step together: {times}.")
    return lines


def _show_what_if(console: Any, compared: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    plain = compared["without"]
    ids, weights = plain["topk_ids"], plain["topk_weights"]
    pairs = ", ".join(f"{e} ({w:.4f})" for e, w in zip(ids, weights, strict=True))
    console.print(Text(f"\nWithout the policy the experts are {pairs}."))
    for name in ("after_token", "after_prompt"):
        side = compared[name]
        words = "bitwise the same" if side["same_logits"] else f"KL {side['kl']:.6f} nats"
        console.print(Text(f"What comes after token {side['position']}: {words}"))
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for head in ("before", "p", "under it", "after", "p", "before it"):
            table.add_column(head, justify="left" if head in ("before", "after") else "right")
        for old, new in zip(side["before"], side["after"], strict=True):
            cells = [
                cell
                for top in (old, new)
                for cell in (
                    repr(top["text"]),
                    f"{top['probability']:.4f}",
                    f"{top['otherwise']:.4f}",
                )
            ]
            table.add_row(*map(Text, cells))
        console.print(table)
    console.print(Text(compared["kl_formula"]), style="dim")
