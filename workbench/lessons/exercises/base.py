"""An exercise: what is asked, a blank to fill in, a check, and a solution that passes it.

A check computes the answer its own way from the record, or runs the engine, and compares. It ends
in one of three outcomes: pass; not yet, with a hint about this answer; could not run, with what
stood in the way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from workbench.lessons.note import Note

Outcome = Literal["pass", "not yet", "could not run"]
SYMBOLS: dict[Outcome, str] = {"pass": "✓", "not yet": "○", "could not run": "✗"}


class NotYet(Exception):
    """The answer is not right yet; the text is a hint."""


class CannotRun(Exception):
    """The answer cannot be checked; the text says why."""


@dataclass(frozen=True, slots=True)
class Exercise:
    """One exercise of one notebook."""

    name: str
    """How `lessons.check` is called: a few words."""
    blank: str
    """The code the learner finds: a comment that says what goes there, and `answer = None`."""
    solution: str
    """Code in place of the blank that passes; it may use what the notebook has made before."""
    verify: Callable[..., str]
    """Called with the answer and what the exercise gives; returns what to say on success."""


class Verdict(Note):
    """How a check ended."""

    def __init__(self, outcome: Outcome, text: str) -> None:
        super().__init__(f"**{SYMBOLS[outcome]} {outcome.capitalize()}.** {text}")
        self.outcome = outcome
        self.text = text

    def __repr__(self) -> str:
        return f"{SYMBOLS[self.outcome]} {self.outcome.capitalize()}. {self.text}"


def judge(exercise: Exercise, answer: Any, given: tuple[Any, ...]) -> Verdict:
    """Check an answer; whatever the learner's code does, this returns a verdict."""
    if answer is None or answer is ...:
        return Verdict("not yet", "The answer is still empty: fill in the cell above and run it.")
    try:
        return Verdict("pass", exercise.verify(answer, *given))
    except NotYet as hint:
        return Verdict("not yet", str(hint))
    except CannotRun as reason:
        return Verdict("could not run", str(reason))


def ask(function: Any, *arguments: Any) -> Any:
    """Call the learner's function.

    Raises:
        CannotRun: it is not a function, or it raised an exception.
        NotYet: it returned nothing.
    """
    if not callable(function):
        raise CannotRun(f"The answer must be a function; it is {described(function)}.")
    try:
        found = function(*arguments)
    except Exception as wrong:
        raise CannotRun(f"Your function raised {type(wrong).__name__}: {wrong}.") from wrong
    if found is None:
        raise NotYet("Your function returns nothing yet; end it with `return`.")
    return found


def whole(answer: Any, what: str) -> int:
    """Return `answer` as an int.

    Raises:
        CannotRun: it is no whole number.
    """
    import numbers

    if isinstance(answer, bool) or not isinstance(answer, numbers.Integral):
        raise CannotRun(f"The answer must be {what}, a whole number; it is {described(answer)}.")
    return int(answer)


def described(value: Any) -> str:
    """Return a value for a sentence: short, with its type."""
    shown = repr(value)
    return f"{shown if len(shown) <= 40 else shown[:39] + '…'} ({type(value).__name__})"
