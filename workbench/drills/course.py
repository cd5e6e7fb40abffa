"""The course of a drill, whatever it runs on: what is asked, named, noted, graded, written down.

`workbench.drills.session` breaks an engine of the drill's own, `workbench.drills.on_service` a
service that others use.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from engine.errors import ConfigError, MachineError, RequestError
from workbench.drills import observation
from workbench.drills.checks import (
    COULD_NOT_RUN,
    FAIL,
    Verdict,
    examine,
    grade,
    judge,
    key,
    measure,
    signals_of,
)
from workbench.drills.readings import MEANINGS, ROWS, AnyReadings, Unreadable
from workbench.drills.scenario import Scenario, check_minutes
from workbench.drills.stages import Tell, untold

SAMPLE_EVERY_S = 1.0
MOST_WORDS = 500
"""Characters of a remark."""


def on_one_line(text: str) -> str:
    r"""Return a text without what would move a reader's cursor or colour their terminal.

    `a\x1b[31mred` and `new\nline` become `a [31mred` and `new line`.
    """
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


class Course(ABC):
    """A drill under way."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        seed: int | None = None,
        minutes: float | None = None,
        surprise: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin the books; nothing runs yet.

        Args:
            scenario: the drill.
            seed: in place of the scenario's: another layer, another expert.
            minutes: in place of the scenario's: how long the fault may last.
            surprise: whether the drill's title is kept back, as in an incident.
            clock: monotonic seconds.
        """
        self.scenario = scenario
        self.seed = scenario.seed if seed is None else seed
        self.surprise = surprise
        self.who = ""
        """Whoever asks for something just now; stands beside it in the journal."""
        self.phase = "new"
        """`new`, `running`, `ended`."""
        self.steady: dict[str, float] = {}
        """Values before the fault, by `checks.key`."""
        self.diagnosis: str | None = None
        self.acts: list[dict[str, Any]] = []
        self.clues = 0
        self.verdicts: dict[str, Verdict] = {}
        self.events: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self.result: dict[str, Any] | None = None
        self._sampled_at = float("-inf")
        self._clock, self._began, self._ended_s = clock, clock(), 0.0
        self.minutes = scenario.minutes if minutes is None else minutes
        check_minutes(self.minutes)
        self.hashes: dict[str, str] = {}
        """What must be equal again at the end, by `proof.hashes`."""

    # ---- what each kind of drill does in its own way

    @abstractmethod
    def prepare(self, tell: Tell = untold) -> None:
        """Measure the steady state and take the hashes; nothing is broken yet."""

    @abstractmethod
    def break_it(self) -> None:
        """Register the undo, then break; the time runs from here."""

    @abstractmethod
    def step(self) -> bool:
        """Go on for a moment; False when the drill has ended."""

    @abstractmethod
    def observe(self) -> dict[str, Any]:
        """Measure every signal now, and show what an operator sees."""

    @abstractmethod
    def act(self, name: str, /, **arguments: Any) -> dict[str, Any]:
        """Change something as an operator would."""

    @abstractmethod
    def restore(self) -> dict[str, Any]:
        """Undo everything and compare hashes with those from before; again does no harm."""

    @abstractmethod
    def readings(self) -> AnyReadings:
        """Return what an operator has before them now."""

    @abstractmethod
    def _gather(self) -> None:
        """Let enough run for every probe, within patience."""

    @property
    def table_version(self) -> int | None:
        """The version of the table in force, where it is known at once."""
        return None

    # ---- what a learner asks for

    def briefing(self) -> dict[str, Any]:
        """Return what a learner may know; in an incident not what the drill is called."""
        return self.scenario.briefing | self._called() | {"surprise": self.surprise}

    def note_down(self, text: str) -> dict[str, Any]:
        """Write a remark into the journal, for the others and for the debrief.

        Raises:
            RequestError: the drill has ended, or the text is empty or long.
        """
        self._require_running()
        if not 0 < len(said := on_one_line(text)) <= MOST_WORDS:
            raise RequestError(f"a remark must have 1 to {MOST_WORDS} characters.")
        self._note("remark", said=said)
        return {"said": said}

    def state(self) -> dict[str, Any]:
        """Return how the drill stands, without anything that would give it away."""
        return {
            "drill": self.scenario.id,
            **self._called(),
            "phase": self.phase,
            "seed": self.seed,
            "elapsed_s": round(self.elapsed_s, 1),
            "left_s": round(max(0.0, self.minutes * 60 - self.elapsed_s), 1),
            "diagnosis": self.diagnosis,
            "acts": list(self.acts),
            "diary": observation.said(self.events, "act"),
            "remarks": observation.said(self.events, "remark"),
            "clues": self.clues,
            "table_version": self.table_version,
            "signals": self.samples[-1]["values"] if self.samples else {},
            "called": {
                key(each): {"name": each.call.name, "unit": MEANINGS[each.call.func].unit}
                for each in self.scenario.signals
            },
            "sampled_s": self.samples[-1]["at_s"] if self.samples else None,
            "checks": {name: verdict.outcome for name, verdict in self.verdicts.items()},
        }

    def diagnose(self, option: str) -> dict[str, Any]:
        """Name the cause; the last one named counts, and whether it is right shows at the end.

        Raises:
            ConfigError: that is not one of the drill's options.
            RequestError: the drill has ended.
        """
        self._require_running()
        if option not in self.scenario.options:
            raise ConfigError(
                f"diagnosis ({option}) must be one of {', '.join(self.scenario.options)}."
            )
        self.diagnosis = option
        self._note("diagnosis", option=option)
        return {"diagnosis": option, "text": self.scenario.options[option]}

    def check(self) -> dict[str, Any]:
        """Run every check on fresh evidence.

        Raises:
            RequestError: the drill has ended.
        """
        self._require_running()
        self._gather()
        self.verdicts = examine(self.scenario.checks, self.readings(), self.steady)
        found = {name: verdict.as_dict() for name, verdict in self.verdicts.items()}
        self._note("check", outcomes={name: v.outcome for name, v in self.verdicts.items()})
        return {"checks": found, "acts": len(self.acts)}

    def hint(self) -> dict[str, Any]:
        """Give the next clue, or the last one again.

        Raises:
            RequestError: the drill has ended.
        """
        self._require_running()
        again = self.clues == len(self.scenario.clues)
        if not again:
            self.clues += 1
            self._note("clue", number=self.clues)
        return {
            "number": self.clues,
            "again": again,
            "of": len(self.scenario.clues),
            "clue": self.scenario.clues[self.clues - 1],
        }

    def finish(self, reason: str = "finished", *, graded: bool = True) -> dict[str, Any]:
        """Check once more, grade, restore, prove it; a second call returns the first's result.

        Args:
            reason: why the drill ends, for the journal.
            graded: False for a drill that was broken off.
        """
        if self.result is not None:
            return self.result
        marks = None
        try:
            if graded and self.phase == "running":
                self.check()
                marks = grade(self.scenario, self.diagnosis, self.verdicts, len(self.acts))
        finally:
            self._ended_s = self._clock() - self._began
            self.phase = "ended"
            self._note("ended", reason=reason)
            proof = self.restore()
        self.result = {
            "drill": self.scenario.id,
            "title": self.scenario.title,
            "reason": reason,
            "grade": marks,
            "diagnosis": self.diagnosis,
            "cause": self.scenario.cause,
            "options": dict(self.scenario.options),
            "checks": {name: verdict.as_dict() for name, verdict in self.verdicts.items()},
            "solution": self.scenario.solution,
            "elapsed_s": round(self._ended_s, 1),
            "clues": self.clues,
            "proof": proof,
        }
        return self.result

    def journal(self) -> dict[str, Any]:
        """Return all that happened, fit for JSON."""
        return {
            "format": 1,
            "briefing": self.scenario.briefing,
            "state": self.state() | {"signals": {}, "sampled_s": None},
            "steady": dict(self.steady),
            "signals": signals_of(self.scenario, self.steady),
            "events": list(self.events),
            "samples": list(self.samples),
            "checks": {name: verdict.as_dict() for name, verdict in self.verdicts.items()},
            "result": self.result,
        }

    @property
    def elapsed_s(self) -> float:
        """Seconds since the fault, or how long the drill took."""
        return self._ended_s if self.phase == "ended" else self._clock() - self._began

    # ---- inside

    def _require_running(self) -> None:
        if self.phase != "running":
            raise RequestError(f"the drill is not running (it is {self.phase}).")

    def _measure_steady(self, readings: AnyReadings, tell: Tell) -> None:
        """Measure every probe before the fault, and hold the signals against what is right.

        Raises:
            MachineError: one cannot be measured, or is not right; nothing was broken.
        """
        different = {key(probe): probe for probe in self.scenario.probes}.values()
        for done, probe in enumerate(different):
            tell("measuring", done, len(different))
            try:
                self.steady[key(probe)] = measure(probe, readings)
            except Unreadable as wrong:
                raise MachineError(f"the steady state cannot be measured: {wrong}") from None
        for probe in self.scenario.signals:
            verdict = judge(probe, readings, self.steady)
            if verdict.outcome == FAIL:
                raise MachineError(
                    f"the engine is not steady: {verdict.name} is {verdict.value:.3g}, right is "
                    f"{verdict.low:.3g} to {verdict.high:.3g}. Nothing was broken."
                )

    def _needed_rows(self) -> int:
        """Return the rows that the most demanding probe wants to see."""
        return max(int(each.call.arguments.get("rows", ROWS)) for each in self.scenario.probes)

    def _time_counts_from_now(self) -> None:
        """Let the clock start at the fault; what was before is negative."""
        warmed_s = self.elapsed_s
        for event in self.events:
            event["at_s"] = round(event["at_s"] - warmed_s, 2)
        self._began = self._clock()

    def _sample(self) -> None:
        """Note the cheap signals, and end the drill where a stop condition is broken."""
        self._sampled_at = self._clock()
        readings = self.readings()
        live = [probe for probe in self.scenario.signals if MEANINGS[probe.call.func].live]
        found = {key(probe): judge(probe, readings, self.steady) for probe in live}
        values = {name: v.value for name, v in found.items() if v.outcome != COULD_NOT_RUN}
        if values:
            self.samples.append({"at_s": round(self.elapsed_s, 2), "values": values})
        for probe in self.scenario.stop:
            verdict = judge(probe, readings, self.steady)
            if verdict.outcome == FAIL:
                self.finish(f"stopped: {verdict.name} is {verdict.value:.3g}", graded=False)
                return

    def _called(self) -> dict[str, str]:
        """Return the drill's title, or only its level while that is kept back."""
        kept_back = self.surprise and self.phase != "ended"
        level = f"Incident of level {self.scenario.level}"
        return {"title": level if kept_back else self.scenario.title}

    def _note(self, what: str, **detail: Any) -> None:
        if self.who:
            detail["who"] = self.who
        self.events.append({"at_s": round(self._clock() - self._began, 2), "what": what, **detail})
