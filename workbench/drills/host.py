"""The drill's own process: engine, traffic and session behind a loopback socket.

`python -m workbench.drills.host` is started by `workbench.drills.client.start`, reads one line of
JSON on standard input, prints a line of JSON for each stage of its start and one when the drill
runs, and ends with its parent: if that is killed, the engine is restored and the journal written
first. It listens with the engine's telemetry, so whoever has the key may both watch the engine and
send the drill's commands.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from engine.errors import ConfigError, WorkbenchError
from engine.runtime.telemetry import Telemetry
from workbench.desk import Desk
from workbench.drills.course import Course, on_one_line
from workbench.drills.files import find
from workbench.drills.on_service import ServiceSession, on_service
from workbench.drills.opening import opened
from workbench.drills.session import Session
from workbench.drills.store import Store
from workbench.lifecycle import Ended, end_with_parent, ending_signals, own_identity

OPTIONS = ("drill", "state", "model", "seed", "minutes", "surprise", "parent", "target", "key")
LINGER_S = 1.0
"""How long an ended drill stays to let its last answer out."""
LONGEST_NAME = 40
Answer = Mapping[str, Any]
Handler = Callable[[Mapping[str, Any]], Answer]
ORPHANED_S = 30.0
"""How long a drill whose runner was killed may take to restore its engine."""
OVERDUE_S = 30.0
"""A drill whose time has been up for so long without ending is stopped from outside its loop."""


def main() -> int:
    """Run one drill until it ends; return the exit code."""
    try:
        options = _options(sys.stdin.readline())
        orphaned = threading.Event()

        def wind_up() -> None:
            orphaned.set()
            os.kill(os.getpid(), signal.SIGTERM)  # `Ended` in the main thread, which restores
            time.sleep(ORPHANED_S)

        with ending_signals():
            end_with_parent(options["parent"], watch_stdin=True, last=wind_up)
            return run(**options, orphaned=orphaned)
    except Ended:
        return 0
    except WorkbenchError as wrong:
        print(wrong, file=sys.stderr)
        return wrong.exit_code


def run(
    *,
    drill: str,
    state: str | None = None,
    model: str,
    seed: int | None = None,
    minutes: float | None = None,
    surprise: bool | None = None,
    parent: str | None = None,
    target: str | None = None,
    key: str | None = None,
    orphaned: threading.Event,
) -> int:
    """Host one drill in this process, on an engine of its own or on the service at `target`.

    What was announced is forgotten at the end unless the drill was orphaned: then a later `reset`
    finds it and tells how it ended.

    Raises:
        ConfigError: the drill or an option is not valid.
        MachineError: another drill runs in the state folder, or the engine is not steady.
    """
    scenario, store = find(drill), Store.at(state)
    with store.locked(), contextlib.closing(Telemetry(on_control=(desk := Desk()).take)) as stream:
        name = store.new_name(drill)
        _tell("engine", 0, 0)
        options: dict[str, Any] = {"seed": seed, "minutes": minutes, "surprise": bool(surprise)}
        course: AbstractContextManager[Course]
        if target is None:
            course = opened(scenario, model=model, sink=stream, **options)
        else:
            course = on_service(scenario, target, key, **options)
        with course as session:
            if isinstance(session, Session):
                stream.show_prompts(session.engine.tokenizer.decode)
            try:
                session.prepare(_tell)
                _tell("fault", 0, 0)
                _watch(session)
                session.break_it()
                _serve(session, desk)
                store.announce(_facts(session, name, stream, parent))
                print(json.dumps({"ready": True, "journal": name}), flush=True)
                _loop(session, desk, lambda: store.save(name, session.journal()))
            except Ended as asked:
                reason = "its runner has gone" if orphaned.is_set() else f"ended by {asked.name}"
                session.finish(reason, graded=False)
            finally:
                if session.phase != "new":
                    session.finish("broken off", graded=False)
                    store.save(name, session.journal())
                if not orphaned.is_set():
                    store.forget()
        return 0 if session.result and session.result["proof"]["restored"] else 1


def _tell(stage: str, done: int, of: int) -> None:
    """Print a stage of the start as a line of JSON; a runner that has gone is told nothing."""
    with contextlib.suppress(OSError):
        print(json.dumps({"stage": stage, "done": done, "of": of}), flush=True)


def _loop(session: Course, desk: Desk, save: Callable[[], Any]) -> None:
    """Step and serve until the drill has ended and whoever ended it has been told."""
    while session.step():
        desk.serve()
    save()
    until = time.monotonic() + LINGER_S
    while time.monotonic() < until:
        desk.serve(0.05)


def _serve(session: Course, desk: Desk) -> None:
    """Let the desk know what a learner may ask for."""

    def act(detail: Mapping[str, Any]) -> Mapping[str, Any]:
        arguments = detail.get("arguments")
        if not isinstance(arguments, Mapping):
            raise ConfigError("arguments must be an object.")
        return session.act(str(detail.get("act")), **arguments)

    handlers: dict[str, Handler] = {
        "briefing": lambda detail: session.briefing(),
        "state": lambda detail: session.state(),
        "observe": lambda detail: session.observe(),
        "act": act,
        "diagnose": lambda detail: session.diagnose(str(detail.get("option"))),
        "check": lambda detail: session.check(),
        "hint": lambda detail: session.hint(),
        "remark": lambda detail: session.note_down(str(detail.get("text", ""))),
        "finish": lambda detail: session.finish(
            str(detail.get("reason", "finished")), graded=bool(detail.get("graded", True))
        ),
    }
    for action, handler in handlers.items():
        desk.handle(action, partial(_by_whom, session, handler))


def _by_whom(session: Course, handler: Handler, detail: Mapping[str, Any]) -> Answer:
    """Do what is asked, with the name of whoever asks."""
    session.who = on_one_line(str(detail.get("who") or ""))[:LONGEST_NAME]
    try:
        return handler(detail)
    finally:
        session.who = ""


def _watch(session: Course) -> None:
    """Throw the process away if its loop does not end the drill in time: the last resort."""
    limit_s = session.minutes * 60 + OVERDUE_S

    def watch() -> None:
        time.sleep(limit_s)
        os._exit(1)

    threading.Thread(target=watch, name="overdue", daemon=True).start()


def _facts(session: Course, journal: str, stream: Telemetry, parent: str | None) -> dict[str, Any]:
    host, port = stream.address
    return {
        "drill": session.scenario.id,
        **_what(session),
        "surprise": session.surprise,
        "hashes": session.hashes,
        "journal": journal,
        "address": [host, port],
        "key": stream.key.hex(),
        "process": own_identity(),
        "runner": parent,
    }


def _what(session: Course) -> dict[str, Any]:
    """Return what the drill runs on, as a later `reset` needs to know it."""
    if isinstance(session, ServiceSession):
        return {"target": session.service.url, "lease": session.lease}
    assert isinstance(session, Session)
    return {"model": str(session.deployment.published)}


def _options(line: str) -> dict[str, Any]:
    try:
        options = json.loads(line)
        return {name: options.get(name) for name in OPTIONS}
    except (ValueError, AttributeError):
        raise ConfigError("standard input must hold one JSON object with the options.") from None


if __name__ == "__main__":
    sys.exit(main())
