"""The subcommands of `workbench`, one file each.

A command's module imports little at its top; the engine and torch load inside the function, so that
`--help` answers at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from workbench.commands import (
    bench,
    demo,
    doctor,
    drill,
    experiment,
    explain,
    generate,
    kernels,
    lab,
    levels,
    model,
    precision,
    scale,
    serve,
    start,
    trace,
    verify,
)

app = typer.Typer(
    name="workbench",
    help="See, step through, break and repair token-level Mixture-of-Experts routing.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from engine import __version__

        print(f"workbench {__version__}")
        raise typer.Exit


@app.callback()
def workbench(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """See, step through, break and repair token-level Mixture-of-Experts routing."""


app.command("start")(start.start)
app.command("lab")(lab.lab)
app.command("generate")(generate.generate)
app.command("explain")(explain.explain)
app.command("levels")(levels.levels)
app.add_typer(trace.app, name="trace")
app.add_typer(model.app, name="model")
app.command("serve")(serve.serve)
app.command("verify")(verify.verify)
app.command("scale")(scale.scale)
app.command("doctor")(doctor.doctor)
app.add_typer(kernels.app, name="kernels")
app.add_typer(precision.app, name="precision")
app.add_typer(drill.app, name="drill")
app.add_typer(demo.app, name="demo")
app.add_typer(bench.app, name="bench")
app.add_typer(experiment.app, name="experiment")
