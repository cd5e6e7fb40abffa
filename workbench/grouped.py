"""Options in groups: a command takes a few dataclasses, its command line all of their fields.

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Limits:
        max_running: Annotated[int, typer.Option(help="Most sequences in one step.")] = 64

    @grouped
    def serve(*, limits: Limits, as_json: JsonOption = False) -> None: ...

has the options `--max-running` and `--json`. Typer reads a function's signature and knows no
groups; a command with forty options would be a function of a hundred lines.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with each parameter that is a dataclass replaced by the dataclass's fields.

    The fields come in its place and in their order; no two parameters may have one name.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if is_dataclass(kind)}

    @wraps(command)
    def flat(**given: Any) -> None:
        made = {
            name: kind(**{one.name: given.pop(one.name) for one in fields(kind)})
            for name, kind in groups.items()
            if isinstance(kind, type)
        }
        command(**made, **given)

    parameters = list(_flattened(inspect.signature(command), hints, groups))
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {one.name: one.annotation for one in parameters}
    return flat


def _flattened(
    signature: inspect.Signature, hints: dict[str, Any], groups: dict[str, Any]
) -> Iterator[inspect.Parameter]:
    keyword = inspect.Parameter.KEYWORD_ONLY
    for parameter in signature.parameters.values():
        if parameter.name not in groups:
            yield parameter.replace(kind=keyword, annotation=hints[parameter.name])
            continue
        kind = groups[parameter.name]
        known = get_type_hints(kind, include_extras=True)
        for one in fields(kind):
            yield inspect.Parameter(
                one.name, keyword, default=one.default, annotation=known[one.name]
            )
