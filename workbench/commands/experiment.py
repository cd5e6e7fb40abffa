"""`workbench experiment`: comparisons that take more than one run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from engine.errors import ConfigError
from workbench import paths
from workbench.options import DeterministicOption, JsonOption, ModelOption
from workbench.output import print_json, size
from workbench.policy import as_usage

WIDTH = 96

app = typer.Typer(help="Compare ways to run the same traffic.", no_args_is_help=True)


@app.callback()
def experiment() -> None:
    """Compare ways to run the same traffic."""


@app.command()
def ladder(
    *,
    ranks: Annotated[
        int | None, typer.Option(help="Measure on so many processes; 4 when nothing is asked.")
    ] = None,
    devices: Annotated[
        int | None, typer.Option(help="Model so many devices of a machine on paper instead.")
    ] = None,
    topology: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The machine: a file in data/hardware, such as 8xH200."),
    ] = None,
    step_tokens: Annotated[
        int | None, typer.Option(help="Modelled: tokens of a step, instead of the frozen number.")
    ] = None,
    model: ModelOption = paths.DEFAULT_MODEL,
    requests: Annotated[int, typer.Option(help="Measured: prompts that run together.")] = 32,
    tokens: Annotated[int, typer.Option(help="Measured: new tokens of each.")] = 16,
    rounds: Annotated[int, typer.Option(help="Measured: repetitions; medians are shown.")] = 5,
    deterministic: DeterministicOption = False,
    as_json: JsonOption = False,
) -> None:
    """Request-level against token-level routing: naive, grouped, overlapped, replicas, smoothing.

    With --ranks it is measured on processes of this machine, with --devices modelled on a machine
    on paper, from inputs frozen in data/hardware/ladder.
    """
    modelled = devices is not None or topology is not None or step_tokens is not None
    if modelled and ranks is not None:
        raise ConfigError(
            f"--ranks ({ranks}) measures on this machine, --devices and --topology model one on "
            "paper; give one or the other."
        )
    if modelled:
        from workbench.bench.ladder import modelled as paper

        report = paper.run(devices=devices or 8, topology=topology, tokens=step_tokens)
    else:
        from workbench.bench.ladder import measured

        report = measured.run(
            paths.model_folder(model),
            ranks=4 if ranks is None else ranks,
            requests=requests,
            tokens=tokens,
            rounds=rounds,
            deterministic=deterministic,
        )
    if as_json:
        print_json(report)
    else:
        _show(report)


@app.command()
def recovery(
    *,
    ranks: Annotated[int, typer.Option(help="Processes.")] = 4,
    times: Annotated[int, typer.Option(help="How many ranks are lost, one after the other.")] = 20,
    requests: Annotated[int, typer.Option(help="Prompts that run together.")] = 8,
    tokens: Annotated[int, typer.Option(help="New tokens of each.")] = 16,
    how: Annotated[
        str, typer.Option(metavar="kill|stop", help="SIGKILL, or SIGSTOP: the rank freezes.")
    ] = "kill",
    model: ModelOption = paths.DEFAULT_MODEL,
    as_json: JsonOption = False,
) -> None:
    """Kill or freeze a rank in the middle of requests, again and again; exit 1 if any is lost.

    Every request must finish with the tokens and the logits of a run that nobody disturbed. How
    long the recoveries took is printed, against a bound that does not decide the exit code: it
    depends on the machine.
    """
    from workbench.bench.recovery import run

    report = run(
        paths.model_folder(model),
        ranks=ranks,
        times=times,
        requests=requests,
        tokens=tokens,
        how=how,
    )
    if as_json:
        print_json(report)
    else:
        _show_recovery(report)
    if not report["same_output"]:
        raise typer.Exit(1)


@app.command()
def rebalance(
    *,
    ranks: Annotated[int, typer.Option(help="Processes.")] = 4,
    rebalances: Annotated[int, typer.Option(help="Tables, one after the other.")] = 500,
    first_mark: Annotated[
        int, typer.Option(help="Memory is looked at after so many tables and after the last.")
    ] = 100,
    idle: Annotated[int, typer.Option(help="Steps afterwards with few rows.")] = 1000,
    model: ModelOption = paths.DEFAULT_MODEL,
    as_json: JsonOption = False,
) -> None:
    """Change the routing table hundreds of times under load; exit 1 if an answer was wrong.

    Also if a process grew by more than 2 %, if ranks joined unequal numbers of collectives, or if a
    table was given up.
    """
    from workbench.bench.rebalance import run

    report = run(
        paths.model_folder(model),
        ranks=ranks,
        rebalances=rebalances,
        first_mark=first_mark,
        idle=idle,
    )
    good = report["flat"] and report["equal_collectives"] and not report["given_up"]
    if as_json:
        print_json(report)
    else:
        for name, value in report.items():
            print(f"{name}: {value}")
    if report["wrong_hashes"] or not good:
        raise typer.Exit(1)


@app.command()
def smoothing(
    *,
    strengths: Annotated[
        str, typer.Option(metavar="B,B,…", help="Bonuses on a logit; 0 is measured in any case.")
    ] = "0.25,0.5,1,2",
    window: Annotated[int, typer.Option(help="Tokens an expert is remembered.")] = 1,
    decay: Annotated[float, typer.Option(help="Factor for every further token.")] = 1.0,
    requests: Annotated[int, typer.Option(help="Prompts that run together.")] = 16,
    tokens: Annotated[int, typer.Option(help="New tokens of each.")] = 32,
    texts: Annotated[int, typer.Option(help="Held-out texts of each domain that are read.")] = 2,
    rounds: Annotated[int, typer.Option(help="Repetitions of the speeds.")] = 3,
    model: ModelOption = paths.DEFAULT_MODEL,
    as_json: JsonOption = False,
) -> None:
    """What a bonus for experts used lately does to jumps, traffic, balance, output and speed."""
    from workbench.bench.smoothing import run

    with as_usage():
        report = run(
            paths.model_folder(model),
            strengths=_strengths(strengths),
            window=window,
            decay=decay,
            requests=requests,
            tokens=tokens,
            texts=texts,
            rounds=rounds,
        )
    if as_json:
        print_json(report)
    else:
        _show_smoothing(report)


@app.command()
def capacity(
    *,
    factors: Annotated[
        str, typer.Option(metavar="F,F,…", help="Times an expert's even share of a step's rows.")
    ] = "2,1.5,1.2,1",
    texts: Annotated[int, typer.Option(help="Held-out texts of each domain that are read.")] = 2,
    model: ModelOption = paths.DEFAULT_MODEL,
    as_json: JsonOption = False,
) -> None:
    """What a capacity factor drops, and what that does to balance and output."""
    from workbench.bench.capacity import run

    chosen = _strengths(factors, "--factors (", "from 1 to 16")
    with as_usage():
        report = run(paths.model_folder(model), factors=chosen, texts=texts)
    if as_json:
        print_json(report)
    else:
        _show_smoothing(report)


def _strengths(
    text: str, option: str = "--strengths (", allowed: str = "from 0 to 100"
) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option}{text}) must read N,N,… with numbers {allowed}.") from None


def _show_smoothing(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    names = [name for name in report["rows"][0] if name not in ("window", "decay")]
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for row in report["rows"]:
        table.add_row(*(str(row[name]) for name in names))
    console.print(table)
    for name, formula in report["formulas"].items():
        console.print(Text(f"{name}: {formula}"), style="dim")


def _show_recovery(report: dict[str, Any]) -> None:
    for number, row in enumerate(report["rows"], 1):
        print(
            f"{number:3}  rank {row['rank']}  noticed after {row['noticed_s']:.2f} s, regrouped in "
            f"{row['regroup_s']:.2f} s, going on after {row['recovery_s']:.2f} s; "
            f"{row['rows_again']} rows again; "
            + ("same tokens" if row["same_output"] else "OTHER TOKENS")
        )
    took = report["recovery_s"]
    print(
        f"recovery: median {took['median']:.2f} s, worst {took['worst']:.2f} s, bound "
        f"{report['bound_s']:g} s"
    )


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from workbench.bench.ladder.rungs import CONTROL, RUNGS

    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)  # or numbers would break into lines
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("rung")
    heads = ("times", "comm.", "messages", "bytes", "comm. ms", "p50 ms", "p99 ms", "used")
    for head in (*heads, "load", "same"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in report["rows"]:
        table.add_row(row["name"], *_cells(row))
    console.print(table)
    shape = report["shape"]
    console.print()
    for rung in (*RUNGS, CONTROL):
        console.print(Text(f"{rung.name}: {rung.what}."))
    console.print(
        Text(
            f"{report['rows'][0]['label']} on {report['topology']}: {shape['model']}, "
            f"{shape['moe_layers']} routed layers, {shape['experts']} experts, top "
            f"{shape['top_k']}, D {shape['hidden']}, F {shape['expert_width']}, "
            f"{report['tokens']:,} tokens a step. times: request-level's throughput. comm.: share "
            "of the step in which rows move or are waited for. used: the least and the most of a "
            "rank's time that is spent computing. load: the busiest rank's rows by the mean. same: "
            "the tokens are request-level's. Messages, bytes, ms: of a step, all layers."
        ),
        style="dim",
    )


def _cells(row: dict[str, Any]) -> list[str]:
    used = row["utilisation"]
    same = {True: "yes", False: "no", None: "-"}[row["same_output"]]
    return [
        f"{row['throughput_normalised']:.2f}",
        f"{row['comm_share']:.0%}",
        f"{row['messages_per_step']:,.0f}",
        size(row["bytes_per_step"]),
        f"{row['comm_ms']:.2f}",
        f"{row['step_p50_ms']:.2f}",
        f"{row['step_p99_ms']:.2f}",
        f"{min(used):.0%}-{max(used):.0%}",
        f"{row['max_over_mean_load']:.2f}",
        same,
    ]
