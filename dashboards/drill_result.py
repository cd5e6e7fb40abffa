"""What the page Drills says once a drill has ended: points, causes, checks, who did what, proof."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dashboards.drill_room import WHO
from workbench.drills.words import debrief_lines, debrief_moments
from workbench.output import count
from workbench.theme import STATES

_HASHED = {"table": "table, without its version"}
"""What a hash is of, where its name alone would mislead: versions rise and never come back."""
_THIS_PAGE = "this page"
_GONE = "The drill is gone, and its engine with it"
_GONE_THERE = "The drill is gone; its lease ends it at the service, which puts all back"


def ending(
    result: Mapping[str, Any] | None, briefing: Mapping[str, Any], journal: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what the last page says.

    Args:
        result: what the drill ended with; None for one whose process has gone.
        briefing: what was known of it.
        journal: all that happened; empty where that is not known.
    """
    if result is None:
        return {"head": _GONE_THERE if "target" in briefing else _GONE, "parts": [], "proof": []}
    grade, proof = result["grade"], result["proof"]
    journal = {**journal, "events": [_by_name(event) for event in journal.get("events", [])]}
    points = f"{grade['points']} of {grade['possible']} points" if grade else "not graded"
    passed = bool(grade and grade["passed"])
    return {
        "head": f"{'✓ Passed' if passed else '■ Not passed' if grade else '■ Ended'}: {points}",
        "tone": "good" if passed else "bad",
        "title": result["title"],  # an incident's briefing keeps it back
        "again": "" if briefing.get("surprise") or "target" in briefing else briefing.get("id", ""),
        "facts": _facts(result, briefing),
        "parts": _parts(result),
        "checks": [_check(check) for check in result.get("checks", {}).values()] if grade else [],
        "cause": briefing.get("options", {}).get(result["cause"], result["cause"]),
        "solution": result["solution"],
        "story": [(_clock(line[0]), *line[1:]) for line in debrief_lines(journal)],
        "moments": list(debrief_moments(journal).items()) if journal["events"] else [],
        "restored": proof["restored"],
        "why": proof.get("why", "") or ("" if proof["hashes"] else "Nothing was changed."),
        "proof": [
            (_HASHED.get(name, name), found["before"][:16], found["after"][:16], found["equal"])
            for name, found in proof["hashes"].items()
        ],
    }


def _facts(result: Mapping[str, Any], briefing: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return how the drill ended, after how long, with which clues, and the cause named."""
    named = briefing.get("options", {}).get(result["diagnosis"])
    right = "✓" if result["diagnosis"] == result["cause"] else "✗"
    clues = f"{count(result['clues'], 'clue')} taken, which cost no points"
    where = [("on", str(briefing["target"]))] if "target" in briefing else []
    return [
        *where,
        ("ended", f"{result['reason']}, after {_clock(result['elapsed_s'])}"),
        ("clues", clues if result["clues"] else "none taken"),
        ("cause named", f"{right} {named}" if named else "none"),
    ]


def _parts(result: Mapping[str, Any]) -> list[tuple[str, int, int, str]]:
    """Return name, points earned and possible of each part, and why it earned less."""
    parts = []
    for name, part in (result["grade"] or {"parts": {}})["parts"].items():
        remark = part.get("remark", "")
        if name == "cause" and part["earned"] < part["possible"]:
            remark = "another was named" if result["diagnosis"] else "none was named"
        parts.append((name, part["earned"], part["possible"], remark))
    return parts


def _check(check: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Return tone, outcome, title and message of a check."""
    look = STATES[check["outcome"]]
    return look.tone, f"{look.symbol} {look.word}", check["name"], check["message"]


def _by_name(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event of a journal with the name that a reader of this page knows."""
    return {**event, "who": _THIS_PAGE} if event.get("who") == WHO else dict(event)


def _clock(seconds: float) -> str:
    """Write seconds as minutes and seconds: 83.4 becomes `1:23`."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
