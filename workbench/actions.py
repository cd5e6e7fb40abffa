"""What a page may ask of the engine's process: the control messages of `workbench start`.

    traffic {paused?, running?, domain?}    what is added from now on
    watch   {text?}                         add one request whose decisions are recorded in full
    window  {}                              the recent past, as `workbench.window` packs it
    ban     {expert, layer?}                never choose an expert, in one layer or in all
    allow   {expert?, layer?}               take that back; without an expert, every ban

A layer goes by the model's number. `ban` and `allow` answer, and every frame tells, what is banned
now: `{"banned": [[0, 3], …]}`, layer and expert.

Everything else is refused by the desk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
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

    layers = engine.model_config.moe_layers

    def ban(detail: Detail) -> Detail:
        at = _cell(detail, layers)
        if "expert" not in detail:
            raise RequestError("ban needs an expert.")
        engine.control.ban_expert(at, detail["expert"])
        return _tell_bans(engine, telemetry)

    def allow(detail: Detail) -> Detail:
        at, policy = _cell(detail, layers), engine.control.policy
        left = {cell for cell in policy.banned if not _meant(cell, at, detail.get("expert"))}
        engine.control.set_policy(replace(policy, banned=frozenset(left)))
        return _tell_bans(engine, telemetry)

    desk.handle("traffic", choose)
    desk.handle("watch", watch)
    desk.handle("window", window.packed, aside=True)
    if engine.model_config.is_moe:
        desk.handle("ban", ban)
        desk.handle("allow", allow)
        _tell_bans(engine, telemetry)
    telemetry.note(model_folder=str(engine.config.model))
    _tell(traffic, telemetry)


def _cell(detail: Detail, layers: Sequence[int]) -> int | None:
    """Return the index of the layer that is meant; None for all."""
    _check(detail, {"expert": int, "layer": int})
    layer = detail.get("layer")
    if layer is not None and layer not in layers:
        raise RequestError(
            f"layer ({layer}) must be one of {', '.join(map(str, layers))}, or none for all."
        )
    return None if layer is None else layers.index(layer)


def _meant(cell: tuple[int, int], layer: int | None, expert: int | None) -> bool:
    """Say whether a ban is one of those that are taken back."""
    return layer in (None, cell[0]) and expert in (None, cell[1])


def _tell_bans(engine: Engine, telemetry: Telemetry) -> Detail:
    layers = engine.model_config.moe_layers
    facts = {"banned": [[layers[at], e] for at, e in sorted(engine.control.policy.banned)]}
    telemetry.note(**facts)
    return facts


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
