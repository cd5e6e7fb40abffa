"""A drill that answers from memory, and the page Drills visited with it."""

from __future__ import annotations

import asyncio
from typing import Any

from dashboards.app import frame_of
from dashboards.pages.drills import Drills
from engine.errors import RequestError

START = ("start", "hot-expert")
COUNTS = [[60, 20, 20, 20], [30, 30, 30, 30]]
SIGNAL = {
    "name": "load of the busiest device", "outcome": "fail", "value": 2.28, "steady": 1.42,
    "low": 1.0, "high": 1.9, "unit": "ratio", "formula": "max / mean", "message": "",
}  # fmt: skip
CHECK = {**SIGNAL, "name": "The devices share the work", "message": "One still has more."}


class FakeDrill:
    """Answers like a drill, from memory."""

    def __init__(self, briefing: dict[str, Any]) -> None:
        self._briefing = briefing
        self.calls: list[tuple[Any, ...]] = []
        self.phase, self.running, self.named = "running", True, None
        self.elapsed_s = 10.0
        self.remarks: list[dict[str, Any]] = []
        self.who = "page"

    def known_as(self, who: str) -> FakeDrill:
        self.who = who
        return self

    def briefing(self) -> dict[str, Any]:
        return self._briefing

    def state(self) -> dict[str, Any]:
        if not self.running:
            raise RequestError("gone.")
        return {
            "phase": self.phase, "left_s": 754.0, "diagnosis": self.named,
            "elapsed_s": self.elapsed_s, "sampled_s": self.elapsed_s,
            "called": {"busiest_device rows=800": {"name": SIGNAL["name"], "unit": "ratio"}},
            "signals": {"busiest_device rows=800": 2.28}, "remarks": self.remarks,
            "diary": [{"at_s": self.elapsed_s, "said": f"did {act}"} for act, _ in self.calls],
        }  # fmt: skip

    def observe(self) -> dict[str, Any]:
        table = {"version": 3, "sha256": "ab" * 32, "planned": {"sha256": "cd" * 32}}
        policy = {"banned": [], "forced": [], "bias": [], "smoothing": 1.2}
        return {
            "signals": [SIGNAL], "rows": 875, "expert_counts": COUNTS, "table": table,
            "device_rows": [[80, 40], [60, 60]], "policy": policy, "acts": len(self.calls),
        }  # fmt: skip

    def act(self, act: str, **arguments: Any) -> dict[str, Any]:
        self.calls.append((act, arguments))
        return {"said": f"did {act}"}

    def diagnose(self, option: str) -> dict[str, Any]:
        self.named = option
        return {"diagnosis": option}

    def check(self) -> dict[str, Any]:
        return {"checks": {"devices": CHECK}, "acts": len(self.calls)}

    def hint(self) -> dict[str, Any]:
        return {"number": 1, "of": 3, "clue": "Count rows by expert."}

    def finish(self, reason: str = "finished") -> dict[str, Any]:
        proof = {"before": "a" * 64, "after": "a" * 64, "equal": True}
        part = {"earned": 30, "possible": 30, "remark": "counts only once repaired"}
        return {
            "reason": reason, "cause": "hot-expert", "solution": "Because.", "clues": 2,
            "diagnosis": self.named, "elapsed_s": 83.4, "title": "An end",
            "checks": {"devices": CHECK},
            "grade": {"passed": False, "points": 30, "possible": 100, "parts": {"cause": part}},
            "proof": {"restored": True, "hashes": {"weights": proof}},
        }  # fmt: skip

    def remark(self, text: str) -> dict[str, Any]:
        self.remarks.append({"at_s": 3.0, "who": self.who, "said": text})
        return {"said": text}

    def journal(self) -> dict[str, Any]:
        named = {"at_s": 75.2, "what": "diagnosis", "option": "torn-table", "who": "page"}
        act = {"at_s": 80.0, "what": "act", "said": "did smooth", "who": "ann"}
        return {"briefing": self._briefing, "events": [named, act]}

    def close(self) -> None:
        self.running = False


def visit(source: Any, *actions: tuple[str, Any]) -> Drills:
    """Open the page, do one action after the other, each to its end."""

    async def run() -> Drills:
        page = Drills(source, "light", {}, frame_of({}, "light"))
        for count, action in enumerate(actions, 1):
            page.page.actions = [[count, *action]]
            await settle(page)
        await settle(page)
        return page

    async def settle(page: Drills) -> None:
        for _ in range(3):
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
            page.tick(anyway=True)

    return asyncio.run(run())
