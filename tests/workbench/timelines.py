"""What every Chrome timeline must obey."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

SLACK_US = 1e-3
"""Half of what a timeline viewer rounds to."""


def assert_valid(events: list[dict[str, Any]]) -> None:
    """Slices nest on each thread; every arrow has one start and one end, each within a slice."""
    threads: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            threads[event["pid"], event["tid"]].append(event)
    for slices in threads.values():
        _assert_nested(slices)
    starts, ends = _flows(events, "s"), _flows(events, "f")
    assert starts.keys() == ends.keys(), starts.keys() ^ ends.keys()
    for key, start in starts.items():
        end = ends[key]
        assert start["pid"] != end["pid"] and start["ts"] <= end["ts"] + SLACK_US, (start, end)
        for flow in (start, end):
            slices = threads[flow["pid"], flow["tid"]]
            assert any(
                each["ts"] - SLACK_US <= flow["ts"] <= each["ts"] + each["dur"] + SLACK_US
                for each in slices
            ), flow
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {key for key in threads if key[0] < 10_000} <= named


def _assert_nested(slices: list[dict[str, Any]]) -> None:
    open_ends: list[float] = []
    for each in sorted(slices, key=lambda one: (one["ts"], -one["dur"])):
        end = each["ts"] + each["dur"]
        while open_ends and open_ends[-1] <= each["ts"] + SLACK_US:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + SLACK_US, f"{each} is not nested"
        open_ends.append(end)


def _flows(events: list[dict[str, Any]], phase: str) -> dict[tuple[str, str], dict[str, Any]]:
    found = [event for event in events if event["ph"] == phase]
    by_key = {(event["cat"], event["id"]): event for event in found}
    assert len(by_key) == len(found), "an id is used twice"
    return by_key
