"""`workbench demo present`: an engine, the dashboard beside it, and one demo led by a presenter.

What is shown lives here and nowhere else: which step, and how its expectations stand. Every frame
of the telemetry carries it as the fact `demo`, so that whoever comes late is on the current step at
once. The other way goes one control message that moves on, and it needs the presenter's key; a page
that lacks the key can look and not drive. The dashboard is a child by command.

    demo          {key, to}                     enter a step
    demo_focus    {key, token, layer, stage}    lead the stepper of this step: places, and a stage
    demo_exhibit  {}                            what that stepper shows, as JSON
    watch         {text?}                       add one request that is recorded in full
    window        {}                            the recent past
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from typing import Any

from engine.errors import MachineError, RequestError
from engine.runtime.telemetry import Telemetry
from workbench import paths
from workbench.actions import MAX_TEXT
from workbench.dashboard import (
    dashboard_process,
    require_packages,
    tell_end,
    when_it_answers,
)
from workbench.demos.player import RUNNING, Player, opened
from workbench.demos.playlist import Playlist
from workbench.desk import Desk
from workbench.lifecycle import Child
from workbench.widgets.steps import STAGES
from workbench.window import Window

_LOOK_EVERY_S = 0.5
Detail = Mapping[str, Any]


class Presentation:
    """One demo under way: the desk's answers, and what every frame says of it."""

    def __init__(self, playlist: Playlist, telemetry: Telemetry, key: str) -> None:
        self.player: Player | None = None
        """None until the engine has been started and asked the known questions."""
        self._playlist, self._telemetry, self._key = playlist, telemetry, key
        self._told = -1
        self._exhibit = ""
        self._focus: Detail | None = None
        self._telemetry.note(demo=self._facts())

    def serve(self, desk: Desk) -> None:
        """Let the desk know what may be asked."""
        desk.handle("demo", self.drive)
        desk.handle("demo_focus", self.lead)
        desk.handle("watch", self.watch)
        desk.handle("demo_exhibit", lambda detail: {"state": self._exhibit}, aside=True)

    def drive(self, detail: Detail) -> Detail:
        """Enter a step for who has the presenter's key; runs between the engine's steps.

        Raises:
            RequestError: the key is wrong, the demo is not ready, or there is no such step.
        """
        player, to = self._led(detail), detail.get("to")
        if type(to) is not int:
            raise RequestError(f"to ({to!r}) must be the place of a step, a whole number from 0.")
        player.go(to)
        self._focus = None
        self.tell()
        return {"at": player.at}

    def lead(self, detail: Detail) -> Detail:
        """Point at a token, a layer and a stage of what the stepper shows, for all who follow.

        Raises:
            RequestError: the key is wrong, there is no stepper yet, or nothing is there.
        """
        player = self._led(detail)
        if player.exhibit is None:
            raise RequestError("there is nothing to step through yet; try again in a moment.")
        places = {"token": len(player.exhibit["tokens"]),
                  "layer": len(player.exhibit["engine"]["layers"])}  # fmt: skip
        for name, count in places.items():
            value = detail.get(name)
            if type(value) is not int or not 0 <= value < count:
                raise RequestError(f"{name} ({value!r}) must be a place from 0 to {count - 1}.")
        if detail.get("stage") not in STAGES:
            raise RequestError(
                f"stage ({detail.get('stage')!r}) must be one of {', '.join(STAGES)}."
            )
        self._focus = {name: detail[name] for name in ("token", "layer", "stage")}
        self._telemetry.note(demo=self._facts())
        return self._focus

    def watch(self, detail: Detail) -> Detail:
        """Take a request of somebody who explores the page Step.

        Raises:
            RequestError: the demo is not ready, or the text cannot be run.
        """
        text = detail.get("text")
        if self.player is None:
            raise RequestError("the engine is not ready yet; try again in a moment.")
        if text is not None and not (isinstance(text, str) and 0 < len(text) <= MAX_TEXT):
            raise RequestError(f"a text must have 1 to {MAX_TEXT} characters.")
        return {"request_id": self.player.traffic.watch(self.player.engine, text)}

    def _led(self, detail: Detail) -> Player:
        """Return the player for who has the presenter's key."""
        key = detail.get("key")
        if not isinstance(key, str) or not hmac.compare_digest(key.encode(), self._key.encode()):
            raise RequestError("only the presenter can move the demo on.")
        if self.player is None:
            raise RequestError("the demo is not ready yet; try again in a moment.")
        return self.player

    def tell(self) -> None:
        """Put the newest state into the frames; cheap when nothing has changed."""
        if self.player is not None and self.player.news != self._told:
            self._told = self.player.news
            exhibit = self.player.exhibit
            self._exhibit = json.dumps(exhibit) if exhibit is not None else ""
            self._telemetry.note(demo=self._facts())

    def _facts(self) -> dict[str, Any]:
        player = self.player
        return {
            "id": self._playlist.id,
            "key_sha256": hashlib.sha256(self._key.encode()).hexdigest(),
            "ready": player is not None,
            "at": player.at if player else -1,
            "visit": player.visit if player else 0,
            "exhibit": bool(self._exhibit),
            "focus": self._focus,
            "done": player.done if player else [],
            "checks": [check.report for check in player.checks] if player else [],
        }


def present(
    playlist: Playlist,
    *,
    ready: Callable[[Detail], None],
    model: str = paths.DEFAULT_MODEL,
    port: int = 5006,
    running: int = RUNNING,
    threads: int | None = None,
) -> None:
    """Run the demo until a signal raises `Ended`; the engine is then put back.

    Args:
        playlist: the demo.
        ready: called once with `presenter_url`, `viewer_url`, `pid` and `dashboard_pid`.
        model: model folder, or the name of a bundled model.
        port: first port to try for the dashboard; the next free one is taken.
        running: requests kept running.
        threads: threads of one product; None takes half of the cores, the rest is for watching.

    Raises:
        MachineError: a package is missing, or the dashboard did not start or has ended.
    """
    require_packages()
    key = secrets.token_urlsafe(18)
    threads = max(1, (os.cpu_count() or 2) // 2) if threads is None else threads
    with ExitStack() as stack:
        desk = stack.enter_context(closing(Desk()))
        telemetry = stack.enter_context(closing(Telemetry(on_control=desk.take)))
        presentation = Presentation(playlist, telemetry, key)
        presentation.serve(desk)
        child = stack.enter_context(dashboard_process(telemetry, port))

        def announce(url: str) -> None:
            ready({"presenter_url": f"{url}?key={key}", "viewer_url": url, "pid": os.getpid(),
                   "dashboard_pid": child.pid})  # fmt: skip

        when_it_answers(child, announce, page="demo")
        window = Window()
        desk.handle("window", window.packed, aside=True)
        player = stack.enter_context(
            opened(playlist, model=model, running=running, threads=threads,
                   sinks=(telemetry, window))
        )  # fmt: skip
        telemetry.show_prompts(player.engine.tokenizer.decode)
        telemetry.note(model_folder=str(player.engine.config.model))
        player.prepare(look=desk.serve)
        presentation.player = player
        player.go(0)
        stack.callback(tell_end, telemetry)  # the first thing that is done when this ends
        _loop(player, presentation, desk, child)


def _loop(player: Player, presentation: Presentation, desk: Desk, child: Child) -> None:
    look_at = 0.0
    while True:
        presentation.tell()
        desk.serve(0.0 if player.run() else 0.05)
        if (now := time.monotonic()) >= look_at:
            look_at = now + _LOOK_EVERY_S
            if not child.alive():
                raise MachineError(child.epitaph())
