"""`workbench verify`: the acceptance checks of a deployment, on a service that runs."""

from __future__ import annotations

from typing import Annotated

import typer

from workbench.commands.scale import KeyFileOption
from workbench.options import JsonOption
from workbench.output import print_json


def verify(
    url: Annotated[str, typer.Argument(help="The service, such as http://127.0.0.1:8000.")],
    *,
    openai: Annotated[
        bool, typer.Option("--openai", help="Any OpenAI-compatible service: no routing, no state.")
    ] = False,
    model: Annotated[str, typer.Option(help="Model name; without it, the first one listed.")] = "",
    requests: Annotated[int, typer.Option(help="Requests at once.")] = 100,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each.")] = 16,
    mean_s: Annotated[float, typer.Option(help="Most seconds a request may take, mean.")] = 10.0,
    p99_s: Annotated[float, typer.Option(help="Most seconds a request may take, P99.")] = 20.0,
    max_skew: Annotated[
        float, typer.Option(help="Most an expert's load may be above an even share, as a factor.")
    ] = 6.0,
    capacity_factor: Annotated[
        float | None, typer.Option(help="Also hold loads against this times an even share.")
    ] = None,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check a running service as one does before it goes live; exit 1 if a check fails."""
    from workbench.acceptance import Expectations, accept, report_lines
    from workbench.remote import Remote, read_key

    expected = Expectations(
        openai_only=openai,
        num_requests=requests,
        max_tokens=max_tokens,
        mean_s=mean_s,
        p99_s=p99_s,
        max_skew=max_skew,
        capacity_factor=capacity_factor,
    )
    with Remote(url, read_key(key_file), timeout_s=10 * p99_s, many=requests) as remote:
        report = accept(remote, expected, model)
    if as_json:
        print_json(report)
    else:
        print("\n".join(report_lines(report)))
    if not report["passed"]:
        raise typer.Exit(1)
