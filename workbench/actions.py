"""What a page may ask of the engine's process: the control messages of `workbench start`.

    traffic {paused?, running?, domain?}    what is added from now on
    watch   {text?}                         add one request whose decisions are recorded in full
    window  {}                              the recent past, as `workbench.window` packs it

Everything else is refused by the desk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.errors import RequestError
from engine.runtime.telemetry import Telemetry
from workbench.desk import Desk
from workbench.traffic import ALL, Traffic
from workbench.window import Window

if TYPE_CHECKING:
    from engine import Engine

MAX_TEXT = 2000
"""Characters of a text that a reader may send."""
_TRAFFIC: dict[str, type] = {"paused": bool, "running": int, "domain": str}
Detail = Mapping[str, Any]


def serve_actions(
    desk: Desk, engine: Engine, traffic: Traffic, telemetry: Telemetry, window: Window
) -> None:
    """Let the desk know the actions, and every frame the traffic that is chosen."""

    def choose(detail: Detail) -> Detail:
        _check(detail, _TRAFFIC)
        traffic.choose(**detail)
        return _tell(traffic, telemetry)

    def watch(detail: Detail) -> Detail:
        _check(detail, {"text": str})
        text = detail.get("text")
        if text is not None and not 0 < len(text) <= MAX_TEXT:
            raise RequestError(f"a text must have 1 to {MAX_TEXT} characters, not {len(text)}.")
        return {"request_id": traffic.watch(engine, text)}

    desk.handle("traffic", choose)
    desk.handle("watch", watch)
    desk.handle("window", window.packed, aside=True)
    telemetry.note(model_folder=str(engine.config.model))
    _tell(traffic, telemetry)


def _tell(traffic: Traffic, telemetry: Telemetry) -> Detail:
    facts = {
        "paused": traffic.paused,
        "running": traffic.running,
        "domain": traffic.domain or ALL,
        "domains": list(traffic.domains),
    }
    telemetry.note(**facts)
    return facts


def _check(detail: Detail, known: Mapping[str, type]) -> None:
    """Refuse a detail of another name or kind; a message from outside may hold any."""
    for name, value in detail.items():
        if name not in known:
            raise RequestError(f"unknown detail {name!r}; known: {', '.join(known)}.")
        if type(value) is not known[name]:
            raise RequestError(f"{name} ({value!r}) must be of the kind {known[name].__name__}.")
