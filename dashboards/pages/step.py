"""The page *Step*: pick a request and a token, and see the decision its step recorded.

Every request of the recent past can be stepped through; logits and scores are there for those that
were recorded in full, which the reader asks for: the engine then takes one more request and keeps
its decisions. Nothing is recorded in full while nobody asks. The address holds the view: request,
token, layer and stage, so that a reload, or somebody else, comes back to the same place.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from dashboards import readings
from dashboards.session import Fetched, Session, builder
from dashboards.source import ENDED, Snapshot, Source
from dashboards.steps import KEPT, Listed, Recent, Shelf, grown, recent
from workbench.widgets import STAGES, State, state_json, stepper_pane

READ_EVERY_S = 1.5
NUM_FULL, NUM_OTHER = 5, 9
"""Places for requests recorded in full, and for the others."""
MAX_TEXT = 500
VIEWS = ("picture", "table")
_BARE = """
.trw { border: 0; border-radius: 0; padding: 0; background: none; }
.trw-text { max-height: max(116px, calc(100vh - 664px)); }
"""
_SHELVES: WeakKeyDictionary[Source, Shelf] = WeakKeyDictionary()


class Step(Session):
    """One session of the page."""

    title = "Step"
    template = "step.html"

    def setup(self) -> dict[str, Any]:
        """Read the request from the address; make the stepper."""
        self.wanted = _number(self.chosen.get("request"))
        self.shown: int | None = None
        self.shelf = _SHELVES.setdefault(self.source, Shelf())
        self.recent: Fetched[Recent] = Fetched(self, self._read, READ_EVERY_S)
        self._drawn = 0
        self._state: State = {"tokens": [], "engine": {"layers": []}}
        self._asked = False
        self._others: list[int | None] = [None] * NUM_OTHER
        view = self.chosen.get("view")
        self.stepper: Any = stepper_pane(
            {"tokens": []},
            theme=self.theme,
            stylesheets=[_BARE],
            view=view if view in VIEWS else VIEWS[0],
        )
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
        if snapshot.frame is not None and snapshot.state not in ENDED:
            self.recent.refresh()
        read = self.recent.count, self.recent.failure
        return (*super().news(snapshot), *read, *self._focus().values())

    def draw(self, snapshot: Snapshot) -> None:
        """Show the request; a growing one grows, and the reader's place stays."""
        past = self.recent.value
        if past is None or self._drawn == self.recent.count:
            return
        self._drawn = self.recent.count
        if past.wanted is None and not self._asked and self.layout(snapshot):
            # Nobody has asked yet: let there be something to step through.
            self._watch()
        if past.state is None or self.wanted not in (None, past.wanted):
            return  # gone, or read before the reader chose another
        if past.wanted != self.shown:
            self._load(past.state)
            self.wanted = self.shown = past.wanted
        elif (state := grown(self._state, past.state)) != self._state:
            self._grow(state)

    def on_action(self, name: str, value: Any) -> None:
        """Choose a request, or have one recorded."""
        if name == "request" and isinstance(value, str) and value.isdecimal():
            self.wanted, self._asked = int(value), True
            self.recent.refresh(now=True)
        elif name == "watch":
            self._watch()
        elif name == "write" and isinstance(value, dict):
            text = value.get("text")
            if isinstance(text, str) and text.strip():
                self._watch(text=text)

    def values(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return the lists of requests and what is said about them."""
        requests = self._requests()
        full = [request for request in requests if request.full][:NUM_FULL]
        others = {request.id: request for request in requests if not request.full}
        known = {request.id for request in requests if request.ended != KEPT}
        gone = self.shown is not None and self.shown not in known
        values: dict[str, Any] = {}
        for at in range(NUM_FULL):
            values |= self._line(f"f{at}", full[at] if at < len(full) else None)
        for at, request in enumerate(self._places(others)):
            values |= self._line(f"o{at}", request)
        return {
            **values,
            "address": self._focus(),
            "no_full": bool(full),
            "no_other": bool(others),
            "said": self._said(gone),
        }

    # ---- inside

    def _load(self, state: State) -> None:
        """Show a request; the first one from the place that the address names."""
        self._state = state
        self.stepper.load(state)
        if self.shown is None and state["request"]["id"] == _number(self.chosen.get("request")):
            token = _place(_positions(state), _number(self.chosen.get("token")))
            layer = _place(state["engine"]["layers"], _number(self.chosen.get("layer")))
            stage = self.chosen.get("stage")
            self.stepper.param.update(
                **({"token": token} if token is not None else {}),
                **({"layer": layer} if layer is not None else {}),
                **({"stage": stage} if stage in STAGES else {}),
            )

    def _grow(self, state: State) -> None:
        """Show more of the same request; the reader's token stays."""
        positions = _positions(self._state)
        here = positions[min(self.stepper.token, len(positions) - 1)]
        self._state = state
        self.stepper.param.update(
            state=state_json(state), token=_place(_positions(state), here) or 0
        )

    def _focus(self) -> dict[str, str | None]:
        """Return what the address says of the stepper: the numbers that the page shows."""
        if self.shown is None:
            return {}
        positions, layers = _positions(self._state), self._state["engine"]["layers"]
        token, layer = self.stepper.token, self.stepper.layer
        view = self.stepper.view
        return {
            "request": str(self.shown),
            "token": str(positions[token]) if token < len(positions) else None,
            "layer": str(layers[layer]) if layer < len(layers) else None,
            "stage": self.stepper.stage,
            "view": None if view == VIEWS[0] else view,
        }

    def _requests(self) -> tuple[Listed, ...]:
        return self.recent.value.requests if self.recent.value else ()

    def _read(self) -> Recent:
        return recent(self.source.window(), self.wanted, self.source.tokens(), self.shelf)

    def _watch(self, **detail: Any) -> None:
        self._asked = True  # so that nothing takes the place of what the reader asks for

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
            f"{place}s": {"": "running", KEPT: KEPT}.get(request.ended, "ended"),
            f"{place}c": "true" if request.id == self.shown else None,
        }

    def _said(self, gone: bool) -> str:
        if self.recent.failure:
            return self.recent.failure
        if self.wanted != self.shown:
            return self._missing()
        if gone:
            return f"Request {self.shown} has left the recent past; it is kept here"
        return ""

    def _missing(self) -> str:
        """Say why the request that is wanted is not there: not yet, or no longer."""
        newest = max((request.id for request in self._requests()), default=-1)
        if self.wanted is None or self.wanted > newest:
            return f"Waiting for request {self.wanted}"
        return f"Request {self.wanted} has left the recent past; choose another"


build = builder(Step)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdecimal() else None


def _positions(state: State) -> list[int]:
    return [token["position"] for token in state["tokens"]]


def _place(numbers: Sequence[int], number: int | None) -> int | None:
    """Return where a number stands; None where it does not."""
    return list(numbers).index(number) if number is not None and number in numbers else None
