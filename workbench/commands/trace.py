"""`workbench trace`: record what the engine does, look into a file, export it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
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
    SeedOption,
    ThresholdsOption,
    open_engine,
)
from workbench.output import count, print_json, say, size

if TYPE_CHECKING:
    from workbench.trace import Trace

app = typer.Typer(help="Record, inspect, draw and export .moetrace files.", no_args_is_help=True)

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A .moetrace file.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOptions:
    """What to run, how far and how."""

    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TEXT]...", help="Prompts; without any, one of each domain."),
    ] = None
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", metavar="FILE", help="Prompts, one a line.")
    ] = None
    max_tokens: Annotated[int, typer.Option(help="Most new tokens for each prompt.")] = 32
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    seed: SeedOption = None

    def prompts(self) -> list[tuple[str, str]]:
        """Return domain and text of each."""
        from workbench.prompts import SAMPLES, read_prompts

        own = read_prompts(self.texts or [], self.prompt_file)
        return [("", prompt) for prompt in own] or list(SAMPLES)


@app.command()
@grouped
def record(
    *,
    file: FileArgument,
    asked: PromptOptions,
    devices: DevicesOption = SHOWN_DEVICES,
    model: ModelOption = paths.DEFAULT_MODEL,
    dtype: AskedDtypeOption = None,
    precision: PrecisionOption = "model",
    thresholds: ThresholdsOption = None,
    drafts: DraftOptions,
    deterministic: DeterministicOption = False,
    asked_of_gate: PolicyOptions,
    capacity_factor: CapacityOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run prompts together in one batch and write every row to FILE."""
    from engine import SamplingParams
    from workbench.trace import Recorder, save
    from workbench.trace.store import check_place

    check_place(file)
    prompts, policy = asked.prompts(), asked_of_gate.policy()
    params = SamplingParams(
        max_tokens=asked.max_tokens, temperature=asked.temperature, seed=asked.seed
    )
    recorder = Recorder()
    with closing(
        open_engine(
            model=model,
            dtype=dtype,
            devices=devices,
            deterministic=deterministic,
            sink=recorder,
            precision=precision,
            thresholds=thresholds,
            drafts=drafts,
            capacity_factor=capacity_factor,
        )
    ) as engine:
        policy.apply(engine)
        for label, prompt in prompts:
            engine.add(prompt, params, label=label)
        while engine.has_work:
            engine.step()
    trace = recorder.trace()
    save(trace, file)
    if as_json:
        print_json(summary(file, trace))
    else:
        say(
            f"{count(trace.num_rows, 'row')} of {count(len(prompts), 'request')} in "
            f"{count(trace.num_steps, 'step')} written to {file} ({size(file.stat().st_size)})"
        )


@app.command()
def info(file: FileArgument, as_json: JsonOption = False) -> None:
    """Check FILE and say what is in it."""
    from workbench.trace import load

    trace = load(file)
    report = summary(file, trace)
    if as_json:
        print_json(report)
    else:
        _show(report)


@app.command()
def export(
    file: FileArgument,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="Where the timeline's JSON goes.")
    ],
) -> None:
    """Write FILE as a Chrome trace (JSON) for ui.perfetto.dev or chrome://tracing."""
    from workbench.trace import load
    from workbench.trace.chrome import timeline
    from workbench.trace.store import check_place

    check_place(out, "timeline")
    events = timeline(load(file))
    out.write_text(json.dumps(events, separators=(",", ":")))
    say(f"{count(len(events['traceEvents']), 'event')} written to {out}")


@app.command()
def draw(
    file: FileArgument,
    *,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="Where the page goes, as HTML.")
    ],
    figure: Annotated[
        list[str] | None,
        typer.Option(
            "--figure", metavar="NAME", help="Only this one, like look_ups; may be repeated."
        ),
    ] = None,
    theme: Annotated[str, typer.Option(metavar="light|dark", help="Colours.")] = "light",
) -> None:
    """Draw FILE as one page for a browser: experts, formats, drafts, devices, time."""
    from engine.config import one_of
    from workbench.figures.page import NAMES, page
    from workbench.theme import THEMES
    from workbench.trace import load
    from workbench.trace.store import check_place

    check_place(out, "page")
    one_of("theme", theme, THEMES)
    for name in figure or ():
        one_of("figure", name, NAMES)
    trace = load(file)
    drawn = page(
        trace, figure or (), title=file.name, theme=theme, text=_token_text(trace.start.model)
    )
    out.write_text(drawn, encoding="utf-8")
    say(f"drawn to {out} ({size(out.stat().st_size)})")


def _token_text(model: str) -> Callable[[int], str] | None:
    """Return what says the text of a token, if the model that wrote the trace is a bundled one."""
    from engine.model.tokenizer import Tokenizer

    return Tokenizer(paths.model_folder(model)).token if model in paths.bundled_models() else None


def summary(file: Path, trace: Trace) -> dict[str, Any]:
    """Return what a trace holds as one JSON object."""
    from collections import Counter

    from engine.events import CAUSES
    from workbench.report import BALANCE_FORMULA, balance
    from workbench.trace.records import pack
    from workbench.trace.schema import VERSION

    start = trace.start
    durations, phy_ids = trace.columns["steps/duration_ms"], trace.columns["rows/phy_ids"]
    times = trace.columns["steps/time_s"]
    causes = Counter(CAUSES[cause] for cause in trace.columns["rows/causes"].tolist())
    return {
        "file": str(file),
        "bytes": file.stat().st_size,
        "version": VERSION,
        "model": start.model,
        "dtype": start.dtype,
        "deterministic": start.deterministic,
        "moe_layers": len(start.moe_layers),
        "experts": start.num_experts,
        "top_k": start.top_k,
        "devices": start.num_devices,
        "steps": trace.num_steps,
        "rows": trace.num_rows,
        "rows_by_cause": dict(causes),
        "requests": sum(request.kind == "added" for request in trace.requests),
        "decisions": len(trace.decisions),
        "seconds": float(times[-1] - times[0] + durations[-1] / 1000) if len(times) else 0.0,
        "step_ms_median": float(_median(durations)) if len(durations) else None,
        "bad_rows": int(trace.columns["steps/bad_rows"].sum()),
        "dropped_slots": int(((phy_ids < 0) & (trace.columns["rows/topk_ids"] >= 0)).sum()),
        "formats": {
            name: int(trace.columns[f"units/{name}"].sum())
            for name in ("rows", "int8_rows", "rerun_rows")
        },
        "expert_counts": trace.expert_counts(),
        "balance": {"value": balance(trace.expert_counts()), "formula": BALANCE_FORMULA},
        "dropped": pack(trace.dropped),
    }


def _mechanisms(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return name and fact of what was on: formats by unit, capacity."""
    facts, formats = [], report["formats"]
    if formats["rows"]:
        share = formats["int8_rows"] / formats["rows"]
        again = f", {formats['rerun_rows']:,} run again"
        facts.append(("formats", f"{share:.1%} of {formats['rows']:,} expert rows in INT8{again}"))
    if report["dropped_slots"]:
        slots = report["rows"] * report["moe_layers"] * report["top_k"]
        lost = f"{report['dropped_slots']:,} of {slots:,} (token, expert) slots"
        facts.append(("dropped", f"{lost} for lack of room"))
    return facts


def _median(values: Any) -> Any:
    import numpy as np

    return np.median(values)


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    facts = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    dropped = report["dropped"]
    causes = ", ".join(f"{n:,} {cause}" for cause, n in report["rows_by_cause"].items())
    median = report["step_ms_median"]
    rows = (
        ("file", f"{report['file']}, {size(report['bytes'])}, format {report['version']}"),
        ("model", f"{report['model']}, {report['dtype']}"),
        (
            "shape",
            f"{count(report['moe_layers'], 'MoE layer')}, {count(report['experts'], 'expert')}, "
            f"top-{report['top_k']}, {count(report['devices'], 'device')}",
        ),
        ("requests", f"{report['requests']:,}"),
        (
            "steps",
            f"{report['steps']:,} in {report['seconds']:.2f} s"
            + (f", median {median:.2f} ms" if median is not None else ""),
        ),
        ("rows", f"{report['rows']:,}" + (f" ({causes})" if causes else "")),
        *_mechanisms(report),
        ("decisions", f"{report['decisions']:,}"),
        ("not kept", f"{count(dropped['steps'], 'step')}, {count(dropped['notes'], 'note')}"),
    )
    for name, fact in rows:
        facts.add_row(Text(name, style="bold"), Text(fact))
    console.print(facts)
    counts_LE = report["expert_counts"]
    if not counts_LE.size or not counts_LE.sum() or counts_LE.shape[1] > 16:
        return
    shares = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    shares.add_column("% of layer")
    for expert in range(counts_LE.shape[1]):
        shares.add_column(f"e{expert}", justify="right")
    for layer, counts_E in enumerate(counts_LE):
        shares.add_row(str(layer), *(f"{100 * n / max(1, counts_E.sum()):.0f}" for n in counts_E))
    console.print()
    console.print(shares)
    balance = report["balance"]
    console.print(Text(f"balance {balance['value']:.2f}  ({balance['formula']})"))
