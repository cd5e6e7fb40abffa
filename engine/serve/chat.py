"""Messages to one text, by the model's own template, or plainly where it has none.

Templates come with the model and are code of a sort: they run in jinja's sandbox, which lets them
change nothing. A model without one is no chat model; its messages are put one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.checkpoint.files import member, read_json
from engine.errors import CheckpointError
from engine.serve.errors import invalid

TEMPLATE = "chat_template.jinja"
CONFIG = "tokenizer_config.json"
MAX_TEXT = 4 << 20


class ChatFormat:
    """Renders the messages of one model."""

    def __init__(self, folder: str | Path) -> None:
        """Read the model's template, if it has one.

        Raises:
            CheckpointError: the template is no valid one.
        """
        folder = Path(folder)
        raw = read_json(member(folder, CONFIG)) if (folder / CONFIG).exists() else {}
        source = raw.get("chat_template")
        if (folder / TEMPLATE).exists():
            source = member(folder, TEMPLATE).read_text(encoding="utf-8")
        self._words = {name: _word(raw.get(name)) for name in ("bos_token", "eos_token")}
        self._template: Template | None = None
        if isinstance(source, str):
            try:
                self._template = _environment().from_string(source)
            except TemplateError as wrong:
                raise CheckpointError(
                    f"{folder}: the chat template is not valid: {wrong}."
                ) from None

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the prompt of a conversation.

        Raises:
            ApiError: the model's template does not take these messages.
        """
        if self._template is None:
            return "\n".join(message["content"] for message in messages)
        try:
            text = self._template.render(
                messages=list(messages), add_generation_prompt=True, **self._words
            )
        except (TemplateError, TypeError, ValueError, KeyError):
            raise invalid(
                "The model's chat template does not take these messages.", "messages"
            ) from None
        if len(text) > MAX_TEXT:
            raise invalid("The conversation is too long.", "messages", "context_length_exceeded")
        return text


def _environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    made.globals["raise_exception"] = _refuse
    made.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return made


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _word(value: Any) -> str:
    """Return a special token's text; some files write it as an object."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""
