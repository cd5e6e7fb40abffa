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

from dashboards import acts, drill_words, readings
from dashboards.course import Course, curve, in_words
from dashboards.drill_room import ENDED, NONE, RUNNING, STARTING, DrillRoom
from dashboards.maps import PageMap
from dashboards.session import Fetched, Session, builder
from dashboards.source import Snapshot
from dashboards.turns import Turns
from engine.errors import WorkbenchError
from workbench.drills.stages import STAGES
from workbench.output import count
from workbench.theme import STATES
from workbench.widgets import MapSpec, fair_shares, load_spec

READ_EVERY_S = 1.0
_WHOSE = (
    "This drill has an engine of its own; status and Pause above are those of the engine on the "
    "other pages."
)
NUM_SIGNALS, NUM_CHECKS, NUM_CLUES, NUM_DIARY, NUM_REMARKS = 4, 6, 3, 6, 6
_HASHED = {"table": "table, without its version"}
"""What a hash is of, where its name alone would mislead: versions rise and never come back."""
_STYLES = (Path(__file__).parent / "drills.css").read_text(encoding="utf-8")
LEVELS = {
    1: "to begin with",
    2: "once the tools are known",
    3: "for those who want to be puzzled",
}
"""Whom each level is for."""
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
        self._drawn: Any = None
        self.map, self.devices = PageMap(self.theme), PageMap(self.theme)
        self.map.fit(250)
        self.devices.fit(250)
        return {"figure": self.map.pane, "second": self.devices.pane, "stylesheets": [_STYLES]}

    def layout(self, snapshot: Snapshot) -> Hashable:
        """The skeleton depends on how far the drill is."""
        return self.room.phase, self.room.briefing.get("id"), self.listed.count

    def parts(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return what the present phase is made of."""
        room = self.room
        parts: dict[str, Any] = {
            "phase": room.phase,
            "listed": self.listed.value or (),
            "levels": LEVELS,
            "briefing": room.briefing,
        }
        if room.phase == STARTING:
            parts["stages"] = STAGES
        if room.phase == RUNNING:
            parts |= {
                "forms": acts.forms(room.briefing.get("id")),
                "signals": range(NUM_SIGNALS),
                "checks": range(NUM_CHECKS),
                "clues": range(NUM_CLUES),
                "diary": range(NUM_DIARY),
                "remarks": range(NUM_REMARKS),
            }
        if room.phase == ENDED:
            parts["end"] = ending(room.seen.get("finish"), room.briefing)
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
        counts_LE, rows_LG = np.array(seen["expert_counts"]), np.array(seen["device_rows"])
        if not rows_LG.size:  # no engine runs, so nothing is placed anywhere
            return
        self.map.say(load_spec(range(len(counts_LE))))
        self.map.draw(fair_shares(counts_LE))
        self.devices.say(_device_spec(*rows_LG.shape))
        self.devices.draw(fair_shares(rows_LG))

    def on_action(self, name: str, value: Any) -> None:
        """Do what the learner asks for, after what was asked for before."""
        room, do = self.room, partial(self._do, (name, str(value)))
        if name == "start" and isinstance(value, str):
            do("Starting", lambda: room.start(value))
        elif name == "incident" and str(value).isdigit():
            do("Starting", lambda: room.start_incident(int(value)))
        elif name == "remark" and isinstance(value, dict):
            do("Noting", lambda: room.ask("remark", drill_words.remark(value)))
        elif name == "cancel":
            room.cancel()
        elif name == "observe":
            do("Measuring", lambda: room.ask("observe"))
        elif name == "check":
            do("Checking and measuring", lambda: self._and_measure(room.ask("check")))
        elif name == "hint":
            do("Asking", lambda: room.ask("hint"))
        elif name == "finish":
            do("Checking, grading, restoring", lambda: room.ask("finish"))
        elif name == "leave":
            room.leave()
        elif name == "diagnose" and isinstance(value, dict) and "option" in value:
            do("Noting", lambda: room.ask("diagnose", str(value["option"])))
        elif name == "act" and isinstance(value, dict):
            do("Acting, then measuring again", lambda: self._act(value))

    def values(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return what the present phase says."""
        room = self.room
        common = {"busy": self.turns.said, "failure": self.listed.failure}
        if room.phase == STARTING:
            return {**common, "starting": room.starting, **_stages(room)}
        if room.phase != RUNNING:
            return common
        seen, state = room.seen, room.state
        left = int(state.get("left_s", 0))
        chosen = room.briefing["options"].get(state.get("diagnosis"))
        return {
            **common,
            "engine": _WHOSE,
            "left": f"{left // 60}:{left % 60:02d} left",
            "diagnosis": f"Named: {chosen}" if chosen else "Not named yet",
            **{
                f"n{at}": option == state.get("diagnosis")
                for at, option in enumerate(room.briefing["options"])
            },
            **self._answers(),
            **drill_words.table(seen.get("observe"), room.stale),
            **drill_words.deployment(seen.get("observe")),
            **_signals(room.briefing, seen.get("observe")),
            **_curves(room.briefing, room.course, seen.get("observe")),
            **_checks(seen.get("check")),
            **_lines("k", room.clues, NUM_CLUES),
            **_lines("y", room.diary[-NUM_DIARY:], NUM_DIARY),
            **_lines("m", drill_words.remarks(state, NUM_REMARKS), NUM_REMARKS),
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

    def _act(self, typed: dict[str, Any]) -> Any:
        form = next((form for form in acts.forms() if form.name == typed.get("act")), None)
        if form is None:
            return None
        self.answers = {}
        try:
            answer = self.room.ask("act", form.name, **acts.arguments(form, typed))
        except WorkbenchError as refusal:
            self.answers = {form.name: ("bad", f"■ Not done: {refusal}")}
            return None
        self.answers = {form.name: ("good", f"✓ {answer['said']}")}
        return self._and_measure(answer)

    def _answers(self) -> dict[str, Any]:
        """Return what stands beside each act's button until another act is tried."""
        values: dict[str, Any] = {}
        for form in acts.forms(self.room.briefing.get("id")):
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


def ending(result: dict[str, Any] | None, briefing: dict[str, Any]) -> dict[str, Any]:
    """Return what the last page says: points, cause, explanation and the proof by hash."""
    if result is None:
        return {"head": "The drill is gone, and its engine with it", "parts": [], "proof": []}
    grade = result["grade"]
    points = f"{grade['points']} of {grade['possible']} points" if grade else "not graded"
    passed = bool(grade and grade["passed"])
    return {
        "head": f"{'✓ Passed' if passed else '■ Not passed' if grade else '■ Ended'}: {points}",
        "tone": "good" if passed else "bad",
        "reason": result["reason"],
        "title": result["title"],  # an incident's briefing keeps it back
        "facts": _facts(result, briefing),
        "parts": [
            (name, part["earned"], part["possible"], part.get("remark", ""))
            for name, part in (grade["parts"] if grade else {}).items()
        ],
        "cause": briefing.get("options", {}).get(result["cause"], result["cause"]),
        "solution": result["solution"],
        "restored": result["proof"]["restored"],
        "proof": [
            (_HASHED.get(name, name), found["before"][:16], found["after"][:16], found["equal"])
            for name, found in result["proof"]["hashes"].items()
        ],
    }


def _facts(result: dict[str, Any], briefing: dict[str, Any]) -> list[tuple[str, str]]:
    """Return how the drill ended, after how long, with which clues, and the cause named."""
    seconds = int(result["elapsed_s"])
    named = briefing.get("options", {}).get(result["diagnosis"])
    right = "✓" if result["diagnosis"] == result["cause"] else "✗"
    clues = f"{count(result['clues'], 'clue')} taken, which cost no points"
    return [
        ("ended", f"{result['reason']}, after {seconds // 60}:{seconds % 60:02d}"),
        ("clues", clues if result["clues"] else "none taken"),
        ("cause named", f"{right} {named}" if named else "none"),
    ]


def _stages(room: DrillRoom) -> dict[str, Any]:
    """Return a sign for each stage of the start, and how far the present one is."""
    stage, done, of = room.stage
    at = list(STAGES).index(stage)
    values: dict[str, Any] = {
        "cancelling": room.cancelled,
        "cancel_word": "Ending the drill's engine …" if room.cancelled else "Cancel",
    }
    for place in range(len(STAGES)):
        values[f"g{place}"] = "✓" if place < at else "◌" if place == at else "·"
        values[f"g{place}c"] = ("tone-good", "now", "muted")[(place >= at) + (place > at)]
        values[f"g{place}n"] = f"{done} of {of}" if place == at and of else ""
    return values


def _signals(briefing: dict[str, Any], seen: dict[str, Any] | None) -> dict[str, Any]:
    """Return one line for each signal; dashes before the first measurement."""
    values: dict[str, Any] = {}
    verdicts = {verdict["name"]: verdict for verdict in (seen or {}).get("signals", ())}
    for at in range(NUM_SIGNALS):
        name = briefing["signals"][at] if at < len(briefing["signals"]) else None
        verdict = verdicts.get(name)
        values |= {f"s{at}h": name is None, f"s{at}n": name or ""}
        if verdict is None:
            values |= {f"s{at}{x}": readings.NOTHING for x in "vbr"} | {f"s{at}o": ""}
            values |= {f"s{at}c": "", f"s{at}f": "", f"s{at}m": ""}
            continue
        look = STATES[verdict["outcome"]]
        values |= {
            f"s{at}v": _value(verdict["value"], verdict["unit"]),
            f"s{at}b": _value(verdict["steady"], verdict["unit"]),
            f"s{at}r": _range(verdict),
            f"s{at}o": f"{look.symbol} {look.word}",
            f"s{at}c": f"tone-{look.tone}",
            f"s{at}f": verdict["formula"],
            f"s{at}m": verdict["message"],
        }
    return values


def _curves(
    briefing: dict[str, Any], course: Course, seen: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the curve of each signal, with the right values as a band."""
    verdicts = {verdict["name"]: verdict for verdict in (seen or {}).get("signals", ())}
    values: dict[str, Any] = {}
    names = [*briefing["signals"], *[""] * NUM_SIGNALS][:NUM_SIGNALS]
    for at, name in enumerate(names):
        points, verdict = course.points(name), verdicts.get(name)
        known = verdict is not None and None not in (verdict["low"], verdict["high"])
        right = (verdict["low"], verdict["high"]) if verdict and known else None
        drawn = curve(points, tuple(course.acts), course.now_s, right)
        values |= {
            f"l{at}d": drawn.line,
            f"l{at}n": drawn.newest,
            f"l{at}a": drawn.acts,
            f"l{at}y": f"{drawn.band[0]:.1f}",
            f"l{at}h": f"{drawn.band[1]:.1f}",
            f"l{at}w": f"{name}: {in_words(points, course.now_s)}",
        }
    return values


def _checks(seen: dict[str, Any] | None) -> dict[str, Any]:
    found = list((seen or {}).get("checks", {}).values())
    values: dict[str, Any] = {"no_checks": bool(found)}
    for at in range(NUM_CHECKS):
        verdict = found[at] if at < len(found) else None
        values[f"c{at}h"] = verdict is None
        if verdict is not None:
            look = STATES[verdict["outcome"]]
            values |= {
                f"c{at}o": f"{look.symbol} {look.word}",
                f"c{at}c": f"tone-{look.tone}",
                f"c{at}n": verdict["name"],
                f"c{at}m": verdict["message"],
            }
    return values


def _lines(place: str, lines: list[str], count: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for at in range(count):
        values[f"{place}{at}h"] = at >= len(lines)
        values[f"{place}{at}"] = lines[at] if at < len(lines) else ""
    return values


def _value(value: float | None, unit: str) -> str:
    if unit == "share":
        return readings.NOTHING if value is None else f"{readings.percent(value)} %"
    return readings.number(value, 0 if unit == "count" else 2)


def _range(verdict: dict[str, Any]) -> str:
    low, high = verdict["low"], verdict["high"]
    if low is None or high is None:
        return readings.NOTHING
    if low == high:
        return _value(low, verdict["unit"])
    return f"{_value(low, verdict['unit'])} – {_value(high, verdict['unit'])}"


def _device_spec(layers: int, devices: int) -> MapSpec:
    return MapSpec(
        title="Load by layer and device",
        rows=tuple(str(layer) for layer in range(layers)),
        column_name="device",
        columns=tuple(str(device) for device in range(devices)),
        unit="× fair share",
        short_unit="×",
        marks=((0.0, "idle"), (1.0, "fair share"), (4.0, "4× or more")),
        idle="Every device is idle",
    )
