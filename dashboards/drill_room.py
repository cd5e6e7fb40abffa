"""The one drill this dashboard holds: listed, started, joined, asked, let go.

A drill's engine is a process of its own (`workbench.drills`); this keeps its handle for all
sessions of the page. Everything here may block for seconds, so pages call it from other threads.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dashboards.course import Course
from engine.errors import MachineError, RequestError, WorkbenchError

NONE, STARTING, RUNNING, ENDED = "none", "starting", "running", "ended"
"""The phases of the room."""
STATE_AGE_S = 0.8
STALE_S = 0.5
"""Values from before an act are measured again after this long, unless that is under way."""
_CANCELLED = "The start was cancelled; the drill's engine is gone, and nothing is left of it."
_CANCELLED_THERE = "The start was cancelled; the service is as it was."
_JOURNAL_S = 3.0
"""Longest wait for the journal of a drill that has ended."""
ASKS = ("observe", "act", "diagnose", "check", "hint", "remark", "finish")
WHO = "page"
"""What stands in the journal beside what is done here, by somebody without a name."""


def told(entry: Mapping[str, Any]) -> str:
    """Write what was done or remarked, when, and by whom where that was not just this page.

    `{"at_s": 12.3, "who": "ann", "said": "nothing is dropped"}` becomes
    `12 s · ann: nothing is dropped`.
    """
    who = entry.get("who", "")
    return f"{entry['at_s']:.0f} s · {'' if who in ('', WHO) else who + ': '}{entry['said']}"


class DrillRoom:
    """Holds at most one drill; from any thread."""

    def __init__(self) -> None:
        self.phase = NONE
        self.starting = ""
        """Title of the drill that is being started."""
        self.target = ""
        """Address of the service that a drill is being started on; "" for an engine of its own."""
        self.stage: tuple[str, int, int] = ("", 0, 0)
        """How far its start is: the stage, and how many of how many of its parts."""
        self.cancelled = False
        self.briefing: dict[str, Any] = {}
        self.state: dict[str, Any] = {}
        self.seen: dict[str, Any] = {}
        """The newest answer to each of `ASKS`."""
        self.course = Course({})
        """What the signals were while this dashboard looked."""
        self.clues: list[str] = []
        self.diary: list[str] = []
        """What was done and when, newest last, from here or from a terminal."""
        self.journal: dict[str, Any] = {}
        """All that happened in the drill that has ended; empty where it left none."""
        self.count = 0
        """Grows with every change."""
        self._drill: Any = None
        self._lock = threading.RLock()
        self._measuring = threading.Lock()
        self._read_at = self._acted_at = 0.0
        self._listed: tuple[dict[str, Any], ...] = ()

    def list(self) -> tuple[dict[str, Any], ...]:
        """Return the briefing of every drill, easiest first.

        `service_ranks` is how many ranks a service needs for it at least; 0 if it may not run on
        one.

        Raises:
            ConfigError: a drill's file is not valid.
        """
        from workbench import drills

        with self._lock:
            if not self._listed:
                found = [drills.find(summary["id"]) for summary in drills.list()]
                self._listed = tuple(
                    one.briefing | {"service_ranks": one.safe.ranks if one.safe else 0}
                    for one in found
                )
            return self._listed

    def start(self, drill: str, **options: Any) -> None:
        """Start a drill; returns when its fault acts.

        Args:
            drill: its id.
            options: of `workbench.drills.start`; `target` and `key` are for a drill on a service.

        Raises:
            ConfigError: there is no such drill.
            MachineError: another one runs, it could not start, or it was cancelled.
        """
        from workbench import drills

        with self._lock:
            if self.phase in (STARTING, RUNNING):
                raise MachineError("a drill is running on this page already; finish it first.")
            called = drills.find(drill)
            surprise = options.get("surprise")
            self.starting = f"Incident of level {called.level}" if surprise else called.title
            self.target = str(options.get("target") or "")
            self.stage, self.cancelled = ("engine", 0, 0), False
            self._to(STARTING)
        try:
            found = drills.start(drill, on_stage=self._on_stage, who=WHO, **options)
            if self.cancelled:
                found.close()
                raise MachineError(self._cancelled_words)
        except BaseException:
            self._to(NONE)
            raise
        self._take(found)
        with contextlib.suppress(RequestError):
            self.ask("observe")

    def start_incident(self, level: int) -> None:
        """Start a drill of a level, drawn at random, whose title is kept back.

        Raises:
            ConfigError: there is no such level.
            MachineError: as `start`.
        """
        from workbench import drills

        self.start(drills.surprise(level), surprise=True)

    def cancel(self) -> None:
        """Break off the drill that is being started, at the next word from its process."""
        if self.phase == STARTING and not self.cancelled:
            self.cancelled = True
            self.count += 1

    def join(self) -> None:
        """Join the drill that was started in a terminal, if there is one."""
        from workbench import drills

        if self.phase in (NONE, ENDED):
            with contextlib.suppress(WorkbenchError):
                self._take(drills.attach(who=WHO))

    def ask(self, name: str, /, *args: Any, who: str = "", **detail: Any) -> Mapping[str, Any]:
        """Ask the drill for one of `ASKS`; `who` stands beside it in the journal.

        Raises:
            RequestError: it refused, or there is none.
            WorkbenchError: what was asked is not allowed.
        """
        assert name in ASKS, name
        if (drill := self._drill) is None:
            raise RequestError("no drill is running here; start one first.")
        if who:
            drill = drill.known_as(who)
        with self._measuring if name == "observe" else contextlib.nullcontext():
            answer: Mapping[str, Any] = getattr(drill, name)(*args, **detail)
        self.seen[name] = answer
        if name == "hint" and answer["clue"] not in self.clues:
            self.clues.append(answer["clue"])
        if name == "observe":
            self.course.measured(answer["signals"])
        if name == "finish":
            self._end()
        else:
            self.refresh(now=True)
        self.count += 1
        return answer

    @property
    def stale(self) -> bool:
        """Whether somebody has acted since the signals were measured."""
        return "observe" in self.seen and self.seen["observe"]["acts"] != len(self.diary)

    def catch_up(self) -> None:
        """Measure a drill that was joined, and again after an act from elsewhere."""
        wanted = self.stale or "observe" not in self.seen
        waited = time.monotonic() - self._acted_at > STALE_S
        if self.phase == RUNNING and wanted and waited and not self._measuring.locked():
            with contextlib.suppress(RequestError):
                self.ask("observe")

    def refresh(self, *, now: bool = False) -> None:
        """Read the drill's state if the last is old; notice an end by itself."""
        with self._lock:
            drill = self._drill
            if drill is None or not (now or time.monotonic() - self._read_at > STATE_AGE_S):
                return
            self._read_at = time.monotonic()
        try:
            state = drill.state()
        except RequestError:
            if not drill.running:
                self._end()
            return
        changed = state != self.state
        self.state = state
        self.course.take(state)
        self._note_acts(state["diary"])
        if state["phase"] == "ended":
            # Its time was up: the result is there for the asking.
            with contextlib.suppress(RequestError):
                self.seen["finish"] = drill.finish()
            self._end()
        elif changed:
            self.count += 1

    def leave(self) -> None:
        """Go back to the list once a drill has ended."""
        if self.phase == ENDED:
            self._to(NONE)

    def close(self) -> None:
        """Let go; a drill started here is ended and restored."""
        drill, self._drill = self._drill, None
        if drill is not None:
            with contextlib.suppress(WorkbenchError):
                drill.close()

    @property
    def _cancelled_words(self) -> str:
        return _CANCELLED_THERE if self.target else _CANCELLED

    def _note_acts(self, diary: Sequence[Mapping[str, Any]]) -> None:
        """Take what was done so far; a check from before the last act counts no more."""
        if len(diary) != len(self.diary):
            self._acted_at = time.monotonic()
        self.diary = [told(act) for act in diary]
        self.course.acted(act["at_s"] for act in diary)
        if self.seen.get("check", {}).get("acts") != len(diary):
            self.seen.pop("check", None)

    def _on_stage(self, stage: str, done: int, of: int) -> None:
        """Note how far the start is.

        Raises:
            MachineError: it was cancelled.
        """
        if self.cancelled:
            raise MachineError(self._cancelled_words)
        if (stage, done, of) != self.stage:
            self.stage = stage, done, of
            self.count += 1

    def _take(self, drill: Any) -> None:
        briefing, state = drill.briefing(), drill.state()
        with self._lock:
            self._drill, self.briefing, self.state = drill, briefing, state
            self.seen, self.clues, self.diary, self.journal = {}, [], [], {}
            self.course = Course({each["name"]: key for key, each in state["called"].items()})
            self.course.take(state)
            self._note_acts(self.state["diary"])
            self._acted_at = time.monotonic()
            self._to(RUNNING)

    def _end(self) -> None:
        with self._lock:
            drill, self._drill = self._drill, None
            if drill is None:
                return
            self._to(ENDED)
        with contextlib.suppress(WorkbenchError):
            drill.close()
        self._read_journal(drill)

    def _read_journal(self, drill: Any) -> None:
        """Read what the drill wrote down; one that others started writes it in a moment."""
        until = time.monotonic() + _JOURNAL_S
        while not self.journal and time.monotonic() < until:
            with contextlib.suppress(WorkbenchError):
                self.journal = drill.journal()
                self.count += 1
                return
            time.sleep(0.1)

    def _to(self, phase: str) -> None:
        self.phase = phase
        self.count += 1
