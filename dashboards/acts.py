"""The forms of a drill's acts, read off their signatures, and what a reader types turned back."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
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


def forms(drill: str | None = None) -> tuple[Form, ...]:
    """Return a form for every act, in their order; with a drill's id, those that it offers."""
    from workbench.drills import find
    from workbench.drills.acts import ACTS, offered

    names = ACTS if drill is None else offered(find(drill))
    return tuple(
        Form(name, (inspect.getdoc(act) or "").partition("\n")[0].replace("`", ""), _fields(act))
        for name, act in ((name, ACTS[name]) for name in names)
    )


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


def _fields(act: Any) -> tuple[Field, ...]:
    found = []
    for name, argument in list(inspect.signature(act).parameters.items())[2:]:
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
