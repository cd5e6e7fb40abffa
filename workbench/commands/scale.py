"""`workbench scale`: more or fewer ranks in a service that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workbench.options import JsonOption
from workbench.output import print_json

KeyFileOption = Annotated[
    Path | None,
    typer.Option("--key-file", metavar="FILE", help="Holds the key; else TOKENROUTER_KEY does."),
]


def scale(
    url: Annotated[str, typer.Argument(help="The service, such as http://127.0.0.1:8000.")],
    *,
    ranks: Annotated[int, typer.Option(help="How many should take part.")],
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add ranks to a running service or take some out; running requests move and go on."""
    from engine.config import at_least
    from engine.errors import MachineError
    from workbench.remote import Remote, read_key, refusal

    at_least("ranks", ranks, 1)
    with Remote(url, read_key(key_file), timeout_s=90.0) as remote:
        status, content = remote.post("/v1/control/scale", {"ranks": ranks})
    if status != 200:
        raise MachineError(f"the service did not scale, {refusal(status, content)}")
    if as_json:
        print_json(content)
        return
    before, now = (", ".join(map(str, content[name])) for name in ("before", "ranks"))
    print(
        f"ranks {before} before, {now} now; table version {content['table_version']}; "
        f"{content['seconds']:.1f} s"
    )
