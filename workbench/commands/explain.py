"""`workbench explain`: the whole routing decision for one token in one layer."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench import paths
from workbench.options import (
    SHOWN_DEVICES,
    DeterministicOption,
    DevicesOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    open_engine,
)
from workbench.output import print_json

if TYPE_CHECKING:
    from engine.events import Decision

BAR_CELLS = 10


def explain(
    text: Annotated[
        str | None, typer.Argument(help="The prompt; - reads it from stdin.", show_default=False)
    ] = None,
    *,
    token: Annotated[
        int, typer.Option(metavar="I", help="Which token of the prompt; 0 is the first.")
    ],
    layer: Annotated[int, typer.Option(metavar="L", help="Which MoE layer; 0 is the first.")],
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", metavar="FILE", help="Read the prompt from it.")
    ] = None,
    devices: DevicesOption = SHOWN_DEVICES,
    model: ModelOption = paths.DEFAULT_MODEL,
    dtype: DtypeOption = "float32",
    deterministic: DeterministicOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show why one token of TEXT went to its experts in one layer, as the step recorded it."""
    from workbench import report
    from workbench.prompts import read_prompt

    prompt = read_prompt(text, prompt_file)
    decision, token_text = decide(
        prompt,
        token=token,
        layer=layer,
        model=model,
        dtype=dtype,
        devices=devices,
        deterministic=deterministic,
    )
    result = report.explanation(decision, index=token, text=token_text)
    if as_json:
        print_json(result)
    else:
        _show(result)


def decide(prompt: str, *, token: int, layer: int, **engine_options: Any) -> tuple[Decision, str]:
    """Run the prompt once and return the recorded decision and the token's text.

    Raises:
        RequestError: the prompt has no such token, or the model no such MoE layer.
    """
    from engine import SamplingParams
    from engine.errors import RequestError
    from workbench.trace import Recorder

    recorder = Recorder()
    with closing(open_engine(sink=recorder, **engine_options)) as engine:
        token_ids = engine.tokenizer.encode(prompt)
        if not 0 <= token < len(token_ids):
            raise RequestError(
                f"token ({token}) must lie between 0 and {len(token_ids) - 1}: "
                f"the prompt has {len(token_ids)} tokens."
            )
        moe_layers = recorder.trace().start.moe_layers
        if layer not in moe_layers:
            there = f"{moe_layers[0]} to {moe_layers[-1]}" if moe_layers else "none, it is dense"
            raise RequestError(f"layer ({layer}) must be a MoE layer; this model has {there}.")
        engine.add(token_ids, SamplingParams(max_tokens=0), watch=(token,))
        while engine.has_work:
            engine.step()
        token_text = engine.tokenizer.token(token_ids[token])
    found = [d for d in recorder.trace().decisions if d.position == token and d.layer == layer]
    assert len(found) == 1, f"{len(found)} decisions were recorded for one token in one layer"
    return found[0], token_text


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    token = result["token"]
    where = {place["expert"]: place for place in result["placements"]}
    chosen = [int(e) for e in result["topk_ids"]]
    weight = dict(zip(chosen, (float(w) for w in result["topk_weights"]), strict=True))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("", "expert", "logit", "score", "weight"):
        table.add_column(name, justify="left" if not name else "right")
    table.add_column("")
    table.add_column("physical", justify="right")
    table.add_column("placed as", overflow="fold")
    order = sorted(range(len(result["scores"])), key=lambda e: -float(result["scores"][e]))
    for expert in [*chosen, *(e for e in order if e not in chosen)]:
        is_next = expert == result["runner_up"]
        mark = "chosen" if expert in chosen else "next" if is_next else ""
        table.add_row(
            mark,
            str(expert),
            f"{float(result['logits'][expert]):.4f}",
            f"{float(result['scores'][expert]):.4f}",
            f"{weight[expert]:.4f}" if expert in weight else "",
            Text("█" * round(BAR_CELLS * weight.get(expert, 0.0))),
            str(where[expert]["physical"]) if expert in where else "",
            where[expert]["reason"] if expert in where else "",
            style="bold" if expert in chosen else None if is_next else "dim",
        )
    console = Console(highlight=False)
    head = f"Token {token['index']} {token['text']!r} (id {token['id']}) in layer {result['layer']}"
    how = f"{result['format']}, routing table {result['table_version']}"
    console.print(Text(f"{head}, {how}\n"))
    console.print(table)
    if result["runner_up"] >= 0:
        lead = f"the score by which the last chosen expert led expert {result['runner_up']}"
        console.print(Text(f"\nMargin {float(result['margin']):.4f}: {lead}."))
    console.print(Text("Decided in " + " → ".join(result["source"])))
