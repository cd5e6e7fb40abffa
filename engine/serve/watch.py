"""What of the engine's events leaves for those who watch: everything but the texts."""

from __future__ import annotations

from dataclasses import replace

from engine.events import Event, RequestEvent, TextEvent


def without_texts(event: Event) -> Event:
    """Return an event without prompts and without what was written."""
    if isinstance(event, TextEvent):
        return replace(event, delta="")
    if isinstance(event, RequestEvent):
        return replace(event, prompt_token_ids=())
    return event
