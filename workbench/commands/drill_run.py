"""Run a drill as long as its command lives: in its own process, or rehearsed in this one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.output import say

if TYPE_CHECKING:
    from workbench.drills import Drill

Where = tuple[str, str | None] | None
"""The address of a service and a key for it, or an engine of the drill's own."""
_LOOK_EVERY_S = 0.2
_SIGNALS_EVERY_S = 5.0


def rehearsed(
    drill: str,
    way: str,
    model: str,
    seed: int | None,
    minutes: float | None,
    where: Where,
) -> dict[str, Any]:
    """Walk a drill without a learner, in this process; return its result.

    Raises:
        WorkbenchError: it could not start, or knows no such way.
    """
    from workbench.drills.files import find
    from workbench.drills.on_service import on_service
    from workbench.drills.opening import opened
    from workbench.drills.rehearsal import rehearse

    scenario = find(drill)
    if where is None:
        with opened(scenario, model=model, seed=seed, minutes=minutes) as session:
            return rehearse(session, way)
    with on_service(scenario, *where, seed=seed, minutes=minutes) as course:
        return rehearse(course, way)


def held(
    drill: str,
    state: Path | None,
    model: str,
    seed: int | None,
    minutes: float | None,
    as_json: bool,
    *,
    surprise: bool = False,
    where: Where = None,
) -> dict[str, Any]:
    """Hold the drill's process until it ends or a signal asks; return its result.

    Raises:
        WorkbenchError: it could not start, or has ended without a result.
    """
    from engine.errors import MachineError
    from workbench.drills import find, start
    from workbench.drills.client import own_name
    from workbench.drills.store import Store
    from workbench.drills.words import briefing_text
    from workbench.lifecycle import Ended, ending_signals

    find(drill)  # an unknown one is refused before anything starts
    store = Store.at(state)
    store.require_free()
    with ending_signals():
        try:
            if not store.busy and (aside := store.set_aside()):
                say(f"what an earlier drill left was damaged and has been set aside as {aside}")
            what = "looking at the service" if where else "starting the engine"
            say(f"{what} and taking the steady state; this takes a moment")
            target, key = where or (None, None)
            options: dict[str, Any] = {
                "target": target,
                "key": key,
                "model": model,
                "seed": seed,
                "minutes": minutes,
                "surprise": surprise,
            }
            with start(drill, state=state, who=own_name(), **options) as running:
                try:
                    briefing = briefing_text(running.briefing())
                    say(briefing) if as_json else print(briefing, flush=True)
                    say("\nThe drill runs. Work on it from a second terminal; Ctrl-C restores.")
                    _hold(running, quiet=as_json)
                except Ended as asked:
                    return running.finish(f"ended by {asked.name}", graded=False)
                result = running.journal().get("result")
        except Ended:
            raise KeyboardInterrupt from None
    if not result:
        raise MachineError(
            "the drill's process has ended without a result, and its engine with it."
        )
    return dict(result)


def _hold(running: Drill, *, quiet: bool) -> None:
    """Wait until the drill's process ends; say now and then how its signals stand."""
    import time
    from contextlib import suppress

    from engine.errors import RequestError
    from workbench.drills.words import signals_line

    shown_at = time.monotonic()
    while running.running:
        time.sleep(_LOOK_EVERY_S)
        if quiet or time.monotonic() - shown_at < _SIGNALS_EVERY_S:
            continue
        with suppress(RequestError):  # it may end between two looks
            state = running.state()
            say(f"{state['elapsed_s']:6.0f} s  {signals_line(state) or 'gathering rows'}")
        shown_at = time.monotonic()
