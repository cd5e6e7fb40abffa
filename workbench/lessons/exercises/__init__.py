"""Self-checking exercises: `check` says pass, not yet with a hint, or could not run.

lessons.check("read the stepper", answer, run, position, layer)
lessons.solution("read the stepper")
"""

from __future__ import annotations

from typing import Any

from engine.errors import ConfigError, nearest
from workbench.lessons.exercises import start_here, what_is_routed
from workbench.lessons.exercises.base import Exercise, Verdict, judge
from workbench.lessons.note import Note

__all__ = ["BY_NOTEBOOK", "Exercise", "Verdict", "check", "exercise", "solution"]

BY_NOTEBOOK: dict[str, tuple[Exercise, ...]] = {
    "00_start_here": start_here.EXERCISES,
    "01_what_is_routed": what_is_routed.EXERCISES,
}
"""The exercises of each notebook, in its order."""


def check(name: str, answer: Any, *given: Any) -> Verdict:
    """Check an answer.

    Args:
        name: which exercise.
        answer: what the learner computed; None is an empty answer.
        given: what the exercise's check takes besides, as the notebook passes it.

    Raises:
        ConfigError: there is no exercise of that name.
    """
    return judge(exercise(name), answer, given)


def solution(name: str) -> Note:
    """Show one way to solve an exercise.

    Raises:
        ConfigError: there is no exercise of that name.
    """
    return Note(f"```python\n{exercise(name).solution.strip()}\n```")


def exercise(name: str) -> Exercise:
    """Return the exercise of that name.

    Raises:
        ConfigError: there is none.
    """
    known = {found.name: found for group in BY_NOTEBOOK.values() for found in group}
    if name not in known:
        raise ConfigError(
            f"exercise ({name!r}) must be one of {', '.join(known)}{nearest(name, known)}"
        )
    return known[name]
