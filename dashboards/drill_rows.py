"""The rows of the page Drills: a drill's signals with their curves, its checks, lines of text."""

from __future__ import annotations

from typing import Any

from dashboards import readings
from dashboards.course import Course, curve, in_words
from workbench.theme import STATES

NUM_SIGNALS, NUM_CHECKS = 4, 6


def signals(briefing: dict[str, Any], seen: dict[str, Any] | None) -> dict[str, Any]:
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


def curves(briefing: dict[str, Any], course: Course, seen: dict[str, Any] | None) -> dict[str, Any]:
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


def checks(seen: dict[str, Any] | None) -> dict[str, Any]:
    """Return outcome, title and message of each check; hidden before the first."""
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


def lines(place: str, lines: list[str], count: int) -> dict[str, Any]:
    """Return `count` lines, those without a text hidden."""
    values: dict[str, Any] = {}
    for at in range(count):
        values[f"{place}{at}h"] = at >= len(lines)
        values[f"{place}{at}"] = lines[at] if at < len(lines) else ""
    return values


def _value(value: float | None, unit: str) -> str:
    if unit == "share":
        return readings.NOTHING if value is None else f"{readings.percent(value)} %"
    sign = f" {unit}" if unit in ("ms", "s") and value is not None else ""
    return readings.number(value, 0 if unit == "count" else 2) + sign


def _range(verdict: dict[str, Any]) -> str:
    low, high = verdict["low"], verdict["high"]
    if low is None or high is None:
        return readings.NOTHING
    if low == high:
        return _value(low, verdict["unit"])
    unit = verdict["unit"]
    return f"{_value(low, unit).removesuffix(f' {unit}')} – {_value(high, unit)}"
