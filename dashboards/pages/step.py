"""The page *Step*: pick a request and a token, and see the decision its step recorded.

Every request of the recent past can be stepped through; logits and scores are there for those that
were recorded in full, which the reader asks for: the engine then takes one more request and keeps
its decisions. Nothing is recorded in full while nobody asks.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from dashboards import readings
from dashboards.session import Fetched, Session, builder
from dashboards.source import Snapshot
from dashboards.steps import Listed, Recent, recent
from workbench.widgets import stepper_pane
from workbench.widgets.steps import state_json

READ_EVERY_S = 1.5
NUM_FULL, NUM_OTHER = 5, 9
"""Places for requests recorded in full, and for the others."""
MAX_TEXT = 500
_BARE = """
.trw { border: 0; border-radius: 0; padding: 0; background: none; }
.trw-head h2 { display: none; }
.trw-text { max-height: max(158px, calc(100vh - 640px)); }
"""


class Step(Session):
    """One session of the page."""

    title = "Step"
    template = "step.html"

    def setup(self) -> dict[str, Any]:
        """Read the request from the address; make the stepper."""
        wanted = self.chosen.get("request", "")
        self.wanted: int | None = int(wanted) if wanted.isdecimal() else None
        self.shown: int | None = None
        self.recent: Fetched[Recent] = Fetched(self, self._read, READ_EVERY_S)
        self._drawn = 0
        self._num_tokens = 0
        self._asked = False
        self._others: list[int | None] = [None] * NUM_OTHER
        self.stepper: Any = stepper_pane({"tokens": []}, theme=self.theme, stylesheets=[_BARE])
        self.stepper.state = ""
        return {"figure": self.stepper}

    def layout(self, snapshot: Snapshot) -> Hashable:
        """The skeleton depends on whether requests can be sent."""
        return "model_folder" in readings.facts(snapshot.frame)

    def parts(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return the places of the list."""
        return {
            "full": range(NUM_FULL),
            "others": range(NUM_OTHER),
            "can_send": self.layout(snapshot),
            "max_text": MAX_TEXT,
        }

    def news(self, snapshot: Snapshot) -> tuple[Any, ...]:
        """Draw again also when the recent past was read anew."""
        if snapshot.frame is not None and snapshot.state not in ("gone", "refused"):
            self.recent.refresh()
        return (*super().news(snapshot), self.recent.count, self.recent.failure)

    def draw(self, snapshot: Snapshot) -> None:
        """Show the request; a growing one grows, and the reader's place stays."""
        past = self.recent.value
        if past is None or self._drawn == self.recent.count:
            return
        self._drawn = self.recent.count
        if past.wanted is None and not self._asked and self.layout(snapshot):
            # Nobody has asked yet: let there be something to step through.
            self._asked = True
            self._watch()
        if past.state is None or self.wanted not in (None, past.wanted):
            return  # gone, or read before the reader chose another
        tokens = len(past.state["tokens"])
        if past.wanted != self.shown:
            self.stepper.load(past.state)
            self.wanted = self.shown = past.wanted
        elif tokens != self._num_tokens:
            self.stepper.state = state_json(past.state)
        self._num_tokens = tokens

    def on_action(self, name: str, value: Any) -> None:
        """Choose a request, or have one recorded."""
        if name == "request" and isinstance(value, str) and value.isdecimal():
            self.wanted = int(value)
            self.recent.refresh(now=True)
        elif name == "watch":
            self._watch()
        elif name == "write" and isinstance(value, dict):
            text = value.get("text")
            if isinstance(text, str) and text.strip():
                self._watch(text=text)

    def values(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return the lists of requests and what is said about them."""
        past = self.recent.value
        requests = past.requests if past else ()
        full = [request for request in requests if request.full][:NUM_FULL]
        others = {request.id: request for request in requests if not request.full}
        values: dict[str, Any] = {}
        for at in range(NUM_FULL):
            values |= self._line(f"f{at}", full[at] if at < len(full) else None)
        for at, request in enumerate(self._places(others)):
            values |= self._line(f"o{at}", request)
        gone = self.shown is not None and self.shown not in {request.id for request in requests}
        return {
            **values,
            "no_full": bool(full),
            "no_other": bool(others),
            "said": self._said(gone),
        }

    # ---- inside

    def _read(self) -> Recent:
        return recent(self.source.window(), self.wanted, self.source.tokens())

    def _watch(self, **detail: Any) -> None:
        def then(answer: Any) -> None:
            self.wanted = int(answer["request_id"])
            self.recent.refresh(now=True)

        self.later(lambda: self.source.control("watch", **detail), then)

    def _places(self, others: dict[int, Listed]) -> list[Listed | None]:
        """Give each request a place that it keeps until it leaves; the newest fill free ones."""
        self._others = [n if n in others else None for n in self._others]
        waiting = [n for n in others if n not in self._others]
        for at, n in enumerate(self._others):
            if n is None and waiting:
                self._others[at] = waiting.pop(0)
        return [None if n is None else others[n] for n in self._others]

    def _line(self, place: str, request: Listed | None) -> dict[str, Any]:
        if request is None:
            return {f"{place}h": True}
        return {
            f"{place}h": False,
            f"{place}v": str(request.id),
            f"{place}n": readings.domain_name(request.label),
            f"{place}t": f"{request.tokens} tokens",
            f"{place}s": "ended" if request.ended else "running",
            f"{place}c": "true" if request.id == self.shown else None,
        }

    def _said(self, gone: bool) -> str:
        if self.recent.failure:
            return self.recent.failure
        if self.wanted != self.shown:
            return f"Waiting for request {self.wanted}"
        if gone:
            return f"Request {self.shown} has left the recent past; it is kept on this page"
        return ""


build = builder(Step)
