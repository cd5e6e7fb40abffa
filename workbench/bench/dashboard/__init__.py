"""What looking costs: the engine's process with and without those who look, and what they see.

Three parts. `engine`: the time of a step with nobody, a dashboard, browsers and many clients.
`frames`: frames drawn in a second of a map of 61 x 256, from an invented source, and the time to
the first. `watched`: what a request costs a step whose decisions are recorded in full.

The engine has a core of its own; all who look share the others. Browsers are real ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from engine.errors import MachineError, RequestError
from workbench.bench.dashboard import cost, frames, process, stage, viewers
from workbench.bench.machine import report

PARTS = ("engine", "frames", "watched")
AIMS: dict[tuple[str, str], tuple[str, float]] = {
    ("engine", "1 browser"): ("<=", 0.02),
    ("engine", f"{cost.MANY} clients of the stream"): ("<=", 0.05),
    ("engine", f"{cost.MANY} readers without a browser"): ("<=", 0.05),
    ("frames", "1 browser"): (">=", 10.0),
    ("frames", f"{cost.MANY} readers without a browser"): (">=", 2.0),
    ("frames", f"{cost.MANY} clients of the stream"): (">=", 2.0),
    ("first frame", "1 browser"): ("<=", 3.0),
    ("first frame", f"{cost.MANY} readers without a browser"): ("<=", 3.0),
    ("first frame", f"{cost.MANY} clients of the stream"): ("<=", 3.0),
}
"""What is wanted of (part, who looks); slowdown as a share, frames a second, seconds."""
MISSING = ("1 browser", "5 browsers")

Row = dict[str, Any]


def run(
    model: Path,
    *,
    parts: tuple[str, ...] = PARTS,
    rounds: int = 4,
    seconds: float = 4.0,
) -> dict[str, Any]:
    """Measure one row per part and kind of looking.

    Args:
        model: folder.
        parts: of `PARTS`.
        rounds: how often every condition is measured.
        seconds: how long each time.

    Raises:
        RequestError: a part is unknown, or a number too small.
        MachineError: the extra `ui` is missing, or a process of ours ended.
    """
    _check(parts, rounds, seconds)
    rows: list[Row] = []
    with ExitStack() as stack:
        for part in parts:
            with ExitStack() as kept:
                invented = part == "frames"
                engine = kept.enter_context(
                    stage.watched_engine(None if invented else model, shape=frames.SHAPE)
                )
                browser, why = _browser(kept)
                rows += _PART[part](engine, browser, rounds, seconds)
                rows += _missing(part, why)
        where = stage.pinning()
        stack.close()
    words = f"--parts {','.join(parts)} --rounds {rounds} --seconds {seconds:g}"
    command = f"workbench bench dashboard --model {model.name} {words} --json"
    return report(rows, command) | {"pinning": where, "base": _BASES}


_BASES = {
    "engine": "slowdown = ms of a step of 8 rows with the stream open, what the desk is asked "
    "included / the same with the stream shut - 1, less the median of that with nobody connected; "
    f"in turns of {cost.TURN_S} s; median, lower and upper quartile over the pairs of turns; "
    f"steps over {process.LONG} medians left out",
    "frames": "frames drawn in a second, median over rounds and who looks; low and high of all",
    "first frame": "seconds from asking for the page, or connecting, to the first frame drawn",
    "watched": "ms of a step of 9 rows, one of them watched, less one of 9 rows, none watched",
}


def _check(parts: tuple[str, ...], rounds: int, seconds: float) -> None:
    for part in parts:
        if part not in PARTS:
            raise RequestError(f"part {part!r} is unknown; choose from {', '.join(PARTS)}.")
    if not parts or rounds < 1 or not seconds > 0:
        raise RequestError("parts, rounds and seconds must be at least one of each.")


def _browser(stack: ExitStack) -> tuple[viewers.Browser | None, str]:
    """Return a browser, or why there is none."""
    try:
        return stack.enter_context(viewers.browser()), ""
    except MachineError as lacking:
        return None, str(lacking)


def _engine(engine: Any, browser: Any, rounds: int, seconds: float) -> list[Row]:
    measured = cost.engine_rounds(engine, browser, rounds, seconds)
    rows = []
    for name, rounds_of in measured.items():
        pairs = [pair for one in rounds_of for pair in one["pairs"]]
        if not pairs:
            why = "no turn had a step of 8 rows in both halves; give it more --seconds"
            rows.append(_row("engine", name, "slowdown", None, None, None, rounds, why))
            continue
        shut, opened = (statistics.median(side) for side in zip(*pairs, strict=True))
        tokens, threads = (
            statistics.median(one[key] for one in rounds_of)
            for key in ("tokens_per_s", "other_threads")
        )
        long = [sum(side) for side in zip(*(one["long_steps"] for one in rounds_of), strict=True)]
        note = (
            f"{opened:.3f} ms a step, {shut:.3f} with the stream shut, {len(pairs)} pairs, "
            f"{long[1]} long steps left out, {long[0]} shut; "
            f"{tokens:.0f} tokens/s; threads beside the engine's take {threads:.1%} of its core"
        )
        values = cost.quartiles(cost.slowdown(measured, name))
        rows.append(_row("engine", name, "slowdown", *values, rounds, note))
    return rows


def _frames(engine: Any, browser: Any, rounds: int, seconds: float) -> list[Row]:
    shown = frames.frame_rounds(engine, browser, rounds, seconds)
    published = cost.spread([one["frames_per_s"] for one in shown.published])[0]
    layers, experts, _ = frames.SHAPE
    source = f"invented source of {layers} x {experts}"
    rows = []
    for name, values in shown.per_s.items():
        note = f"{source}; {published:.1f} frames/s published to {cost.MANY} clients"
        rows.append(_row("frames", name, "frames/s", *cost.spread(values), rounds, note))
    for name, values in shown.first_s.items():
        rows.append(_row("first frame", name, "s", *cost.spread(values), rounds, source))
    return rows


def _watched(engine: Any, browser: Any, rounds: int, seconds: float) -> list[Row]:
    measured = cost.watched_rounds(engine, browser, rounds, seconds)
    rows = []
    for name in list(measured)[1:]:
        values = cost.spread(cost.watched_cost(measured, name))
        base = cost.spread([one["ms"] for one in measured[cost.BASE_EXTRA]])[0]
        note = f"{values[0] / base:+.1%} of {base:.3f} ms; only while such a request runs"
        rows.append(_row("watched", name, "ms a step", *values, rounds, note))
    return rows


_PART = {"engine": _engine, "frames": _frames, "watched": _watched}


def _missing(part: str, why: str) -> Iterable[Row]:
    """Yield the rows that need a browser, with the reason, where there is none."""
    if why:
        for name in MISSING:
            for what in {"frames": ("frames", "first frame")}.get(part, (part,)):
                if (what, name) in AIMS or part == "engine":
                    yield _row(what, name, "", None, None, None, 0, why)


def _row(
    part: str,
    name: str,
    unit: str,
    value: float | None,
    low: float | None,
    high: float | None,
    rounds: int,
    note: str,
) -> Row:
    """Return one row; of frames every reader's own rate has to meet the aim."""
    sign, aim = AIMS.get((part, name), ("", None))
    judged = low if part == "frames" else value
    met = None
    if aim is not None and judged is not None:
        met = judged <= aim if sign == "<=" else judged >= aim
    return {
        "part": part,
        "name": name,
        "value": None if value is None else round(value, 4),
        "unit": unit,
        "aim": None if aim is None else f"{sign} {aim:g}",
        "met": met,
        "low": None if low is None else round(low, 4),
        "high": None if high is None else round(high, 4),
        "rounds": rounds,
        "note": note,
    }
