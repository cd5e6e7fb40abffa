"""The start as five stages: each is logged with time and outcome and fails in its own words."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.errors import WorkbenchError
from engine.serve.health import STAGES, Health

Say = Callable[[str], None]


class StartError(WorkbenchError):
    """A stage of the start failed."""

    def __init__(self, stage: int, seconds: float, cause: BaseException) -> None:
        reason = " ".join(str(cause).split()) or type(cause).__name__
        super().__init__(
            f"start failed in stage {stage} of {len(STAGES)} ({STAGES[stage - 1]}) after "
            f"{seconds:.2f} s: {reason}"
        )
        self.stage = stage
        self.exit_code = getattr(cause, "exit_code", 1)


class Stages:
    """Runs the stages in order and says how each went."""

    def __init__(self, say: Say, health: Health) -> None:
        self._say, self._health = say, health

    @contextmanager
    def stage(self, name: str) -> Iterator[Callable[[str], None]]:
        """Run one stage; what it is given takes the words for its outcome.

        Raises:
            StartError: the stage failed.
        """
        number = self._health.stage + 1
        assert STAGES[number - 1] == name, f"stage {number} is {STAGES[number - 1]}, not {name}"
        self._say(f"stage {number}/{len(STAGES)} {name}: begins")
        began, outcome = time.perf_counter(), list[str]()
        try:
            yield outcome.append
        except (WorkbenchError, OSError, RuntimeError) as cause:
            seconds = time.perf_counter() - began
            self._say(f"stage {number}/{len(STAGES)} {name}: failed after {seconds:.2f} s")
            raise StartError(number, seconds, cause) from cause
        seconds = time.perf_counter() - began
        self._health.stage = number
        words = "; ".join(outcome) or "done"
        self._say(f"stage {number}/{len(STAGES)} {name}: ok in {seconds:.2f} s: {words}")
