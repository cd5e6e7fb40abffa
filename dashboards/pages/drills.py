"""The page *Drills*: find and repair a fault in a running engine, and see that all is as it was.

The drill's engine is a process of its own beside the one that the other pages show; this page sees
of it what an operator would.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dashboards import acts, drill_rows, drill_words
from dashboards.drill_result import ending
from dashboards.drill_room import ENDED, NONE, RUNNING, STARTING, DrillRoom
from dashboards.drill_rows import NUM_CHECKS, NUM_SIGNALS
from dashboards.maps import PageMap
from dashboards.session import Fetched, Session, builder
from dashboards.source import Snapshot
from dashboards.turns import Turns
from engine.errors import WorkbenchError
from workbench.drills.stages import STAGES
from workbench.widgets import MapSpec, fair_shares, load_spec

READ_EVERY_S = 1.0
_WHOSE = "; status and Pause above are those of the engine on the other pages."
LONGEST_NAME = 40
NUM_CLUES, NUM_DIARY, NUM_REMARKS = 3, 6, 6
_STYLES = (Path(__file__).parent / "drills.css").read_text(encoding="utf-8")
LEVELS = {
    1: "to begin with",
    2: "once the tools are known",
    3: "for those who want to be puzzled",
}
"""Whom each level is for."""
_NOTING = "Noting the cause"
_THERE = ("drill", "url", "key")
"""What is typed for a drill on a service."""
ROOM = DrillRoom()
"""The drill of this process, for all who look."""


class Drills(Session):
    """One session of the page."""

    title = "Drills"
    template = "drills.html"
    room = ROOM

    def setup(self) -> dict[str, Any]:
        """Make both maps."""
        self.listed: Fetched[tuple[dict[str, Any], ...]] = Fetched(self, self._list, 3600.0)
        self.polled: Fetched[int] = Fetched(self, self._poll, READ_EVERY_S)
        self.turns = Turns(self)
        self.answers: dict[str, tuple[str, str]] = {}
        """The act that was tried last: tone, and how it went."""
        self.who = ""
        """The name that stands in the journal beside what is done here."""
        self.checked = self.finishing = False
        """Whether somebody here has checked, or wants to end the drill."""
        self._drawn: Any = None
        self.map, self.devices = PageMap(self.theme), PageMap(self.theme)
        self.map.fit(250)
        self.devices.fit(250)
        return {"figure": self.map.pane, "second": self.devices.pane, "stylesheets": [_STYLES]}

    def layout(self, snapshot: Snapshot) -> Hashable:
        """The skeleton depends on how far the drill is."""
        room = self.room
        return room.phase, room.briefing.get("id"), self.listed.count, bool(room.journal)

    def parts(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return what the present phase is made of."""
        room = self.room
        parts: dict[str, Any] = {
            "phase": room.phase,
            "listed": self.listed.value or (),
            "levels": LEVELS,
            "briefing": room.briefing,
            "target": room.target,
        }
        if room.phase == STARTING:
            first = {"engine": "The service is looked at"} if room.target else {}
            parts["stages"] = STAGES | first
        if room.phase == RUNNING:
            parts |= {
                "forms": acts.forms(room.briefing),
                "signals": range(NUM_SIGNALS),
                "checks": range(NUM_CHECKS),
                "clues": range(NUM_CLUES),
                "diary": range(NUM_DIARY),
                "remarks": range(NUM_REMARKS),
            }
        if room.phase == ENDED:
            parts["end"] = ending(room.seen.get("finish"), room.briefing, room.journal)
        return parts

    def news(self, snapshot: Snapshot) -> tuple[Any, ...]:
        """Draw again also when the drill has changed."""
        self.listed.refresh()
        self.polled.refresh()
        return (
            *super().news(snapshot),
            self.room.count,
            self.listed.count,
            self.turns.said,
            *self.answers.values(),
        )

    def draw(self, snapshot: Snapshot) -> None:
        """Draw the load of experts and devices as last measured."""
        seen = self.room.seen.get("observe")
        if seen is None or seen is self._drawn:
            return
        self._drawn = seen
        briefing, counts_LE = self.room.briefing, np.array(seen["expert_counts"])
        rows_LG = np.array(seen["device_rows"])
        self.map.say(load_spec(briefing.get("layers") or range(len(counts_LE))))
        self.map.draw(fair_shares(counts_LE))
        if "target" in briefing:  # a service does not tell it by device
            return
        if not rows_LG.size:  # no engine runs, so nothing is placed anywhere
            rows_LG = np.zeros((len(counts_LE), max(briefing["needs"].values())))
        self.devices.say(_device_spec(*rows_LG.shape))
        self.devices.draw(fair_shares(rows_LG))

    def on_action(self, name: str, value: Any) -> None:
        """Do what the learner asks for, after what was asked for before."""
        room, do, ask = self.room, partial(self._do, (name, str(value))), self._ask
        if name in ("start", "incident", "target"):
            self.notice = ""  # what was refused before
        if name == "start" and isinstance(value, str):
            do("Starting", lambda: room.start(value))
        elif name == "incident" and str(value).isdigit():
            do("Starting", lambda: room.start_incident(int(value)))
        elif name == "target" and isinstance(value, dict):
            self._start_there({part: str(value.get(part, "")).strip() for part in _THERE})
        elif name == "name":
            self.who = str(value).strip()[:LONGEST_NAME]
        elif name == "remark" and isinstance(value, dict):
            do("Noting", lambda: ask("remark", str(value.get("text", "")).strip()))
        elif name == "cancel":
            room.cancel()
        elif name == "observe":
            do("Measuring", lambda: ask("observe"))
        elif name == "check":
            self.checked = True
            do("Checking and measuring", lambda: self._and_measure(ask("check")))
        elif name == "hint":
            do("Asking", lambda: ask("hint"))
        elif name == "finish":
            self._finish(do)
        elif name == "leave":
            room.leave()
        elif name == "diagnose" and isinstance(value, dict) and "option" in value:
            do(_NOTING, lambda: ask("diagnose", str(value["option"])))
        elif name == "act" and isinstance(value, dict):
            do("Acting, then measuring again", lambda: self._act(value))

    def values(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return what the present phase says."""
        room = self.room
        common = {"busy": self.turns.said, "failure": self.listed.failure}
        if room.phase == STARTING:
            return {**common, "starting": room.starting, **_stages(room)}
        if room.phase != RUNNING:
            self.checked = self.finishing = False
            return common
        seen, state = room.seen, room.state
        left = int(state.get("left_s", 0))
        chosen = room.briefing["options"].get(state.get("diagnosis"))
        return {
            **common,
            "engine": f"This drill {_where(room.briefing)}{_WHOSE}",
            "left": f"{left // 60}:{left % 60:02d} left",
            "diagnosis": f"Named: {chosen}" if chosen else "Not named yet",
            **{
                f"n{at}": option == state.get("diagnosis")
                for at, option in enumerate(room.briefing["options"])
            },
            **drill_words.unnamed(
                state.get("diagnosis"), checked=self.checked, finishing=self.finishing
            ),
            **({"name": self.who} if room.briefing.get("surprise") else {}),
            **self._answers(),
            **drill_words.table(seen.get("observe"), room.stale),
            **drill_words.deployment(seen.get("observe")),
            **drill_rows.signals(room.briefing, seen.get("observe")),
            **drill_rows.curves(room.briefing, room.course, seen.get("observe")),
            **drill_rows.checks(seen.get("check")),
            **drill_rows.lines("k", room.clues, NUM_CLUES),
            **drill_rows.lines("y", room.diary[-NUM_DIARY:], NUM_DIARY),
            **drill_rows.lines("m", drill_words.remarks(state, NUM_REMARKS), NUM_REMARKS),
            "no_diary": bool(room.diary),
            "hint_word": f"Clue {min(len(room.clues) + 1, room.briefing['clues'])} "
            f"of {room.briefing['clues']}",
        }

    # ---- inside

    def _list(self) -> tuple[dict[str, Any], ...]:
        return self.room.list()

    def _poll(self) -> int:
        """Follow the drill; join one that a terminal has started."""
        if self.room.phase == NONE and self.polled.count % 3 == 1:
            self.room.join()
        self.room.refresh()
        if not self.turns.said:
            self.room.catch_up()
        return self.room.count

    def _ask(self, name: str, /, *args: Any, **detail: Any) -> Any:
        """Ask the drill in the name of whoever sits here."""
        return self.room.ask(name, *args, who=self.who, **detail)

    def _start_there(self, typed: dict[str, str]) -> None:
        """Start a drill on a service; its key goes to the drill's process and nowhere else."""
        drill, url, key = typed["drill"], typed["url"], typed["key"]
        work = partial(self.room.start, drill, target=url, key=key or None)
        self._do(("target", drill, url), "Starting", work)

    def _finish(self, do: Callable[[str, Callable[[], Any]], None]) -> None:
        """End the drill; without a cause only when asked a second time."""
        unnamed = self.room.state.get("diagnosis") is None and _NOTING not in self.turns.said
        if unnamed and not self.finishing:
            self.finishing = True
        else:
            do("Checking, grading, restoring", lambda: self._ask("finish"))

    def _act(self, typed: dict[str, Any]) -> Any:
        offered = acts.forms(self.room.briefing)
        form = next((form for form in offered if form.name == typed.get("act")), None)
        if form is None:
            return None
        self.answers = {}
        try:
            answer = self._ask("act", form.name, **acts.arguments(form, typed))
        except WorkbenchError as refusal:
            self.answers = {form.name: ("bad", f"■ Not done: {refusal}")}
            return None
        self.answers = {form.name: ("good", f"✓ {answer['said']}")}
        return self._and_measure(answer)

    def _answers(self) -> dict[str, Any]:
        """Return what stands beside each act's button until another act is tried."""
        values: dict[str, Any] = {}
        for form in acts.forms(self.room.briefing):
            tone, said = self.answers.get(form.name, ("muted", ""))
            values |= {f"a-{form.name}": said, f"a-{form.name}-c": f"small answer tone-{tone}"}
        return values

    def _and_measure(self, answer: Any) -> Any:
        """Measure the signals again: what stands beside an act or a check is never from before."""
        if self.room.phase == RUNNING:
            self.room.ask("observe")
        return answer

    def _do(self, key: Hashable, word: str, work: Callable[[], Any]) -> None:
        """Do `work` in its turn, unless the drill it was meant for is over by then."""
        phase = self.room.phase

        def unless_over() -> Any:
            return work() if self.room.phase == phase else None

        self.turns.ask(key, word, unless_over)


build = builder(Drills)


def _where(briefing: dict[str, Any]) -> str:
    """Say what a drill runs on."""
    if "target" in briefing:
        return f"runs on {briefing['target']}, which puts all back when it ends"
    return "has an engine of its own"


def _stages(room: DrillRoom) -> dict[str, Any]:
    """Return a sign for each stage of the start, and how far the present one is."""
    stage, done, of = room.stage
    at = list(STAGES).index(stage)
    values: dict[str, Any] = {
        "cancelling": room.cancelled,
        "cancel_word": (
            "Cancel"
            if not room.cancelled
            else "Letting go of the service …"
            if room.target
            else "Ending the drill's engine …"
        ),
    }
    for place in range(len(STAGES)):
        values[f"g{place}"] = "✓" if place < at else "◌" if place == at else "·"
        values[f"g{place}c"] = ("tone-good", "now", "muted")[(place >= at) + (place > at)]
        values[f"g{place}n"] = f"{done} of {of}" if place == at and of else ""
    return values


def _device_spec(layers: int, devices: int) -> MapSpec:
    return MapSpec(
        title="Load by layer and device",
        rows=tuple(str(layer) for layer in range(layers)),
        column_name="device",
        columns=tuple(str(device) for device in range(devices)),
        unit="× fair share",
        short_unit="×",
        low_word="idle",
        marks=((0.0, "idle"), (1.0, "fair share"), (4.0, "4× or more")),
        idle="Every device is idle",
    )
