"""The forms of a drill's acts, read off their signatures, and what a reader types turned back."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from engine.errors import ConfigError

_HINTS = {
    "float": ("number", "any"),
    "int": ("number", "1"),
    "int | None": ("number", "1"),
    "str": ("text", ""),
    "Sequence[int]": ("text", ""),
}


class Field(NamedTuple):
    """One input of a form."""

    name: str
    kind: str
    """The annotation of the act's argument."""
    type: str
    step: str
    placeholder: str
    value: str
    required: bool


class Form(NamedTuple):
    """One act."""

    name: str
    does: str
    fields: tuple[Field, ...]


def forms(briefing: Mapping[str, Any] | None = None) -> tuple[Form, ...]:
    """Return a form for every act on an engine; with a briefing, for those that its drill offers.

    A drill on a service has other acts than one on an engine of its own, and says which.
    """
    from workbench.drills import acts_service, find
    from workbench.drills.acts import ACTS, offered

    if briefing is None:
        return _forms(ACTS, ACTS, given=2)
    if "target" in briefing:
        return _forms(acts_service.ACTS, briefing["acts"], given=1)
    return _forms(ACTS, offered(find(briefing["id"])), given=2)


def _forms(acts: Mapping[str, Any], names: Iterable[str], given: int) -> tuple[Form, ...]:
    """Return the forms of `names`; the first `given` parameters are not the reader's."""
    return tuple(Form(name, _first_line(acts[name]), _fields(acts[name], given)) for name in names)


def _first_line(act: Any) -> str:
    return (inspect.getdoc(act) or "").partition("\n")[0].replace("`", "")


def arguments(form: Form, typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the act's arguments from the texts a reader typed.

    Raises:
        ConfigError: a text is not of its argument's kind.
    """
    given: dict[str, Any] = {}
    for field in form.fields:
        text = str(typed.get(field.name, "")).strip()
        if not text and not field.required:
            continue
        try:
            given[field.name] = _value(field.kind, text)
        except ValueError:
            raise ConfigError(
                f"{field.name} ({text!r}) must be {_words(field.kind)} for {form.name}."
            ) from None
    return given


def _fields(act: Any, given: int) -> tuple[Field, ...]:
    found = []
    for name, argument in list(inspect.signature(act).parameters.items())[given:]:
        kind, required = str(argument.annotation), argument.default is inspect.Parameter.empty
        default = "" if required or argument.default is None else str(argument.default)
        hint = "0, 7" if kind == "Sequence[int]" else "all" if kind == "int | None" else ""
        found.append(Field(name, kind, *_HINTS[kind], hint, default, required))
    return tuple(found)


def _value(kind: str, text: str) -> Any:
    if kind == "float":
        return float(text)
    if kind == "str":
        return text
    if kind == "Sequence[int]":
        return [int(part) for part in text.replace(",", " ").split()] or int("")
    return int(text)


def _words(kind: str) -> str:
    if kind == "Sequence[int]":
        return "whole numbers with commas between"
    return "a number" if kind == "float" else "a whole number"
