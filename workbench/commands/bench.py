"""`workbench bench`: the numbers that the README quotes, made here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.errors import ConfigError
from workbench import paths
from workbench.options import (
    DraftLengthOption,
    DraftTokensOption,
    DtypeOption,
    JsonOption,
    ModelOption,
)
from workbench.output import print_json

app = typer.Typer(help="Measure this machine; --json prints the report.", no_args_is_help=True)

BatchesOption = Annotated[
    str, typer.Option("--batches", metavar="B,B,…", help="Numbers of sequences run together.")
]
TokensOption = Annotated[int, typer.Option("--tokens", help="New tokens for each sequence.")]
ThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", help="Threads of one product; without it, torch's setting."),
]
DRAFT_MODEL = "polyglot-draft"
MOST = 16384
"""Of a list's numbers: sequences or rows that every machine of the workbench can hold."""
RoundsOption = Annotated[int, typer.Option("--rounds", help="Repetitions; medians are shown.")]


@app.command()
def startup(
    *,
    model: ModelOption = paths.DEFAULT_MODEL,
    dtype: DtypeOption = "float32",
    rounds: RoundsOption = 5,
    as_json: JsonOption = False,
) -> None:
    """Time from a new process to a ready engine and to the first token."""
    from workbench.bench.startup import run

    _print(run(paths.model_folder(model), dtype=dtype, rounds=rounds), as_json)


@app.command()
def recorder(
    *,
    model: ModelOption = paths.DEFAULT_MODEL,
    batches: BatchesOption = "1,8,32",
    tokens: TokensOption = 64,
    rounds: RoundsOption = 3,
    threads: ThreadsOption = 1,
    as_json: JsonOption = False,
) -> None:
    """Step time with and without recording every row, in turns."""
    from workbench.bench.recorder import run

    result = run(
        paths.model_folder(model),
        batches=_numbers(batches),
        tokens=tokens,
        rounds=rounds,
        threads=threads,
    )
    _print(result, as_json)


@app.command()
def decode(
    *,
    model: ModelOption = paths.DEFAULT_MODEL,
    batches: BatchesOption = "1,8,32",
    dtypes: Annotated[str, typer.Option(metavar="D,D", help="Number formats.")] = "float32",
    tokens: TokensOption = 64,
    rounds: RoundsOption = 3,
    threads: ThreadsOption = None,
    transformers: Annotated[bool, typer.Option(help="Also run transformers' generate.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Tokens per second against transformers, same weights and prompts, in turns."""
    from workbench.bench.decode import run

    result = run(
        paths.model_folder(model),
        batches=_numbers(batches),
        dtypes=tuple(dtypes.split(",")),
        tokens=tokens,
        rounds=rounds,
        threads=threads,
        against=transformers,
    )
    _print(result, as_json)


@app.command()
def dashboard(
    *,
    model: ModelOption = paths.DEFAULT_MODEL,
    parts: Annotated[
        str, typer.Option(metavar="PART,…", help="Of engine, frames and watched.")
    ] = "engine,frames,watched",
    rounds: RoundsOption = 4,
    seconds: Annotated[float, typer.Option(help="How long each measurement takes.")] = 4.0,
    as_json: JsonOption = False,
) -> None:
    """What looking costs the engine, and what those who look see; some minutes, real browsers."""
    from workbench.bench.dashboard import run

    chosen = tuple(parts.split(","))
    _print(run(paths.model_folder(model), parts=chosen, rounds=rounds, seconds=seconds), as_json)


@app.command()
def gpu(
    *,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the report; without it, data/benchmarks.")
    ] = None,
    section: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="May be repeated; without it, all.")
    ] = None,
    tune: Annotated[
        int | None, typer.Option(metavar="SECONDS", help="For tiles; 0 leaves them as they are.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="On the CPU, interpreted, tiny; measures nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Every kernel on this NVIDIA GPU: right against fp64, and fast against peers; 4 minutes."""
    from workbench.bench.machine import require_triton

    require_triton()
    from workbench.bench.gpu import entry

    outcome = entry.measure(
        out=out,
        names=section or (),
        tune_seconds=tune,
        dry=dry_run,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if as_json:
        print_json(outcome.report)
    else:
        print(outcome.text)
    if not outcome.well:
        raise typer.Exit(1)


@app.command("moe-layer")
def moe_layer(
    *,
    tokens: Annotated[
        str, typer.Option("--tokens", metavar="T,T,…", help="Rows of the batch.")
    ] = "1,8,64,512",
    rounds: RoundsOption = 9,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """One layer's experts against transformers' own, with the share of the roofline."""
    from workbench.bench.moe_layer import run

    _print(run(tokens=_numbers(tokens, "--tokens"), rounds=rounds, threads=threads), as_json)


@app.command()
def gate(
    *,
    tokens: Annotated[
        str, typer.Option("--tokens", metavar="T,T,…", help="Rows of the batch.")
    ] = "1,8,64,512",
    rounds: RoundsOption = 15,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Choosing experts against eager torch and transformers' routers, in turns."""
    from workbench.bench.gate import run

    _print(run(tokens=_numbers(tokens, "--tokens"), rounds=rounds, threads=threads), as_json)


@app.command()
def speculation(
    *,
    model: ModelOption = paths.DEFAULT_MODEL,
    draft: Annotated[str, typer.Option(metavar="DIR", help="The draft.")] = "polyglot-draft",
    domains: Annotated[
        str, typer.Option(metavar="NAME,…", help="Domains of the bundled corpus.")
    ] = "num,en,fr,es,zh,py,math,de",
    prompts: Annotated[int, typer.Option(help="Prompts of each domain.")] = 3,
    tokens: TokensOption = 128,
    rounds: RoundsOption = 3,
    draft_tokens: DraftTokensOption = 4,
    draft_length: DraftLengthOption = "adaptive",
    dtype: DtypeOption = "float32",
    threads: ThreadsOption = 1,
    as_json: JsonOption = False,
) -> None:
    """Tokens per second with a draft and without, at batch 1, by domain, in turns."""
    from workbench.bench.speculation import run

    result = run(
        paths.model_folder(model),
        paths.model_folder(draft),
        domains=tuple(domains.split(",")),
        prompts=prompts,
        tokens=tokens,
        rounds=rounds,
        draft_tokens=draft_tokens,
        draft_length=draft_length,
        dtype=dtype,
        threads=threads,
    )
    _print(result, as_json)


@app.command()
def dispatch(
    *,
    ranks: Annotated[int, typer.Option(help="Processes that exchange rows.")] = 4,
    sizes: Annotated[
        str, typer.Option(metavar="T,T,…", help="Tokens of all ranks together.")
    ] = "8,32,128,512,1024",
    rounds: RoundsOption = 7,
    as_json: JsonOption = False,
) -> None:
    """Dispatch and combine without a model: each way to exchange, and the model of its times."""
    from workbench.bench.dispatch import run

    chosen = _numbers(sizes, "--sizes")
    _print(run(ranks=ranks, sizes=chosen, rounds=rounds), as_json)


@app.command("routing-overhead")
def routing_overhead(
    *,
    model: ModelOption = paths.DEFAULT_MODEL,
    batches: BatchesOption = "1,4,8,32,128",
    steps: Annotated[int, typer.Option(help="Decode steps of each way in a round.")] = 24,
    rounds: RoundsOption = 3,
    threads: ThreadsOption = 1,
    large: Annotated[bool, typer.Option(help="Also a random model of a large shape.")] = True,
    draft: Annotated[bool, typer.Option(help="Also with the bundled draft model.")] = True,
    ranks: Annotated[bool, typer.Option(help="Also on two processes.")] = True,
    as_json: JsonOption = False,
) -> None:
    """The share of a step spent deciding, by batch, with each way to save it switched off."""
    from workbench.bench.routing_overhead import run

    result = run(
        paths.model_folder(model),
        batches=_numbers(batches),
        steps=steps,
        rounds=rounds,
        threads=threads,
        large=large,
        draft=paths.model_folder(DRAFT_MODEL) if draft else None,
        ranks=ranks,
    )
    _print(result, as_json)


def _numbers(text: str, option: str = "--batches") -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(
        part.isascii() and part.isdigit() and len(part) <= len(str(MOST)) and 1 <= int(part) <= MOST
        for part in parts
    ):
        raise ConfigError(
            f"{option} ({text}) must read N,N,… with whole numbers of at least 1, at most {MOST}."
        )
    return tuple(int(part) for part in parts)


def _print(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    rows = report["rows"]
    formulas = {name: rows[0][name] for name in rows[0] if name.endswith("_formula")}
    names = [name for name in rows[0] if name not in formulas]
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(str(row[name]) for name in names))
    console = Console(highlight=False)
    console.print(table)
    machine = report["machine"]
    notes = list(report.get("notes", ()))
    notes += [f"{name.removesuffix('_formula')}: {text}" for name, text in formulas.items()]
    notes.append(
        f"{report['label']} on {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['threads']} threads, load {machine['load_average']}, torch {machine['torch']}"
    )
    for note in notes:
        console.print(Text(note), style="dim")
