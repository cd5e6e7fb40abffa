"""What of the engine's events leaves for those who watch: everything but the texts."""

from __future__ import annotations

from dataclasses import replace

from engine.events import Event, RequestEvent, Sink, TextEvent


class WithoutTexts:
    """Passes events on without prompts and without what was written."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    @property
    def enabled(self) -> bool:
        """Whether the sink behind listens."""
        return self._sink.enabled

    def emit(self, event: Event) -> None:
        """Pass one event on."""
        if isinstance(event, TextEvent):
            event = replace(event, delta="")
        elif isinstance(event, RequestEvent):
            event = replace(event, prompt_token_ids=())
        self._sink.emit(event)
