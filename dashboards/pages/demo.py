"""The page *Demo*: one step at a time, led by a presenter; whoever looks may follow or explore.

What is shown is what the engine's process says in the fact `demo`; the texts are read from the
playlist. The presenter's page has the key in its address and asks the engine's process to move on.
Every other page follows, or goes its own way until its reader comes back. Without a presenter the
page can be read alone, with live pictures: the texts of the domain that a step would send are
counted alone, and the stepper's text is written by the running engine. It then says that nothing is
changed, and marks what is only so when the step is presented.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from dashboards import readings
from dashboards.exhibit import written
from dashboards.maps import PageMap
from dashboards.readings import ALL
from dashboards.session import Session, builder
from dashboards.source import ENDED, Snapshot
from engine.errors import WorkbenchError
from engine.events import STAGES
from workbench.demos.measures import MEASURES
from workbench.demos.playlist import Expect, Playlist, Step, find, playlists
from workbench.demos.words import bounds, measured
from workbench.theme import STATES, State
from workbench.widgets import load_spec, stepper_pane
from workbench.widgets.steps import STAGES as STEPPER_STAGES

Focus = tuple[int, int, str]
"""Places of a token and a layer, and a stage."""
_STYLES = (Path(__file__).parent / "demo.css").read_text(encoding="utf-8")
_BARE = """
.trw { border: 0; border-radius: 0; padding: 0; background: none; }
.trw-head h2 { display: none; }
.trw-text { max-height: 116px; }
.trw-hint { flex-wrap: nowrap; white-space: nowrap; }
.trw-meaning { overflow: hidden; text-overflow: ellipsis; }
.trw-figure { min-height: 0; }
.trw-plot { height: clamp(150px, calc(100vh - 650px), 300px); }
"""


class Demo(Session):
    """One session of the page: the presenter's, or one that follows or explores."""

    title = "Demo"
    template = "demo.html"

    def setup(self) -> dict[str, Any]:
        """Read the presenter's key from the address; make map and stepper."""
        self.key = self.chosen.get("key", "")
        step = self.chosen.get("step", "")
        self.own: int | None = max(0, int(step) - 1) if step.isdecimal() else None
        """The step this reader has gone to, kept in the address; None follows the presenter."""
        self.map = PageMap(self.theme)
        self.stepper: Any = stepper_pane({"tokens": []}, theme=self.theme, stylesheets=[_BARE])
        self.stepper.state = ""
        self._loaded = self._loading = -1
        self._asked = ""
        """The text that the engine was asked to write for who reads alone."""
        self._focus: Focus | None = None
        """The place in the stepper that was sent to all, or taken from the presenter, last."""
        return {"figure": self.map.pane, "second": self.stepper, "stylesheets": [_STYLES]}

    def layout(self, snapshot: Snapshot) -> Hashable:
        """The skeleton is made anew with every step."""
        live, playlist = _live(snapshot), self._playlist(snapshot)
        return (
            playlist.id if playlist else None,
            self._at(snapshot),
            self._presents(live),
            live is None,
            self._told(snapshot),
            self._steppable(live),
            live is None and _takes_texts(snapshot),
            readings.shape(snapshot.frame),
        )

    def parts(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return the playlist, the step that is shown and the reader's role."""
        live, playlist = _live(snapshot), self._playlist(snapshot)
        at = self._at(snapshot)
        return {
            "playlist": playlist,
            "at": at,
            "step": playlist.steps[at] if playlist else None,
            "presents": self._presents(live),
            "led": live is not None,
            "told": self._told(snapshot),
            "steppable": self._steppable(live),
            "writing": live is None and _takes_texts(snapshot),
            "counted": self._counted_words(snapshot),
            "stages": readings.stages(),
            "meter_top": readings.METER_TOP,
        }

    def news(self, snapshot: Snapshot) -> tuple[Any, ...]:
        """Draw again also when the reader has moved in the stepper."""
        return (*super().news(snapshot), self._here())

    def draw(self, snapshot: Snapshot) -> None:
        """Draw what the step shows."""
        step = self._step(snapshot)
        if step is None or snapshot.frame is None:
            return
        if step.view["kind"] == "map":
            self._draw_map(snapshot, step)
        elif step.view["kind"] == "stepper":
            self._load_exhibit(snapshot, step)
            self._lead_or_follow(snapshot, step)

    def on_height(self, name: str, height: int) -> None:
        """Let the map fill its place."""
        if name == "figure":
            self.map.fit(height)

    def on_action(self, name: str, value: Any) -> None:
        """Go to another step: the presenter with everybody, a viewer alone."""
        snapshot = self.source.snapshot()
        live, playlist = _live(snapshot), self._playlist(snapshot)
        if playlist is None:
            return
        at, last = self._at(snapshot), len(playlist.steps) - 1
        moves = {"next": at + 1, "back": at - 1, "first": 0, "last": last}
        if name == "follow":
            self.own = self._focus = None
            return
        if name == "jump" and isinstance(value, str) and value.isdecimal():
            to = int(value)
        elif name in moves:
            to = moves[name]
        else:
            return
        to = min(last, max(0, to))
        if self._presents(live):
            if to != at:
                self.ask("demo", key=self.key, to=to)
        else:
            self.own = to

    def values(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return the role in words, the expectations and the overhead."""
        live = _live(snapshot)
        alone = self.own is not None and not self._presents(live)
        return {
            "address": {"step": str(self._at(snapshot) + 1) if alone else None},
            **self._role(snapshot, live),
            **self._checks(snapshot, live),
            **_overhead(snapshot),
        }

    # ---- where we are

    def _playlist(self, snapshot: Snapshot) -> Playlist | None:
        live = _live(snapshot)
        return _known(live["id"] if live else None)

    def _presents(self, live: Mapping[str, Any] | None) -> bool:
        """Whether this page holds the presenter's key; the engine's process asks for it again."""
        if live is None or not self.key:
            return False
        return bool(hashlib.sha256(self.key.encode()).hexdigest() == live["key_sha256"])

    def _at(self, snapshot: Snapshot) -> int:
        live = _live(snapshot)
        led = max(0, live["at"]) if live else 0
        at = led if self.own is None or self._presents(live) else self.own
        playlist = self._playlist(snapshot)
        return min(at, len(playlist.steps) - 1) if playlist else 0

    def _step(self, snapshot: Snapshot) -> Step | None:
        playlist = self._playlist(snapshot)
        return playlist.steps[self._at(snapshot)] if playlist else None

    def _role(self, snapshot: Snapshot, live: Mapping[str, Any] | None) -> dict[str, Any]:
        if live is None:
            role, away = "○ No presenter: read at your own pace", False
        elif not live["ready"]:
            role, away = "◌ The demo is being prepared", False
        elif self._presents(live):
            role, away = "● You present", False
        elif self.own is None:
            role, away = "● Following the presenter", False
        else:
            role, away = f"◇ Exploring; the presenter is on step {live['at'] + 1}", True
        return {
            "role": role,
            "stay": not away,
            "away": away,
            "place": f"{self._at(snapshot) + 1}",
            "done": " · ".join(live["done"]) if live and self._on_live(snapshot, live) else "",
        }

    def _on_live(self, snapshot: Snapshot, live: Mapping[str, Any]) -> bool:
        return bool(live["at"] == self._at(snapshot))

    def _told(self, snapshot: Snapshot) -> str:
        """Return the words that mark a step's claims as no measurements; empty where they hold.

        What a step does to the engine, or has written by it, is there only while it is presented.
        """
        live, step = _live(snapshot), self._step(snapshot)
        if step is None or (live is not None and self._on_live(snapshot, live)):
            return ""
        if not step.actions and (step.view["kind"] != "stepper" or self._own_text(live)):
            return ""
        when = "the presenter is on this step" if live else "this tour is presented"
        return f"When {when}, it changes the engine so that:" if step.actions else f"When {when}:"

    def _steppable(self, live: Mapping[str, Any] | None) -> bool:
        """Whether the stepper has something to show, or soon will."""
        return live is not None or bool(self.stepper.state)

    def _own_text(self, live: Mapping[str, Any] | None) -> bool:
        """Whether the stepper shows the step's text as written for who reads alone."""
        return live is None and bool(self.stepper.state)

    def _counted(self, snapshot: Snapshot) -> str:
        """Return the domain that a step's map counts alone where nobody sends it alone, or all."""
        step = self._step(snapshot)
        if step is None or not self._told(snapshot):
            return ALL
        sent = [action.arguments for action in step.actions if action.name == "traffic"]
        return str(sent[-1].get("domain", ALL)) if sent else ALL

    def _counted_words(self, snapshot: Snapshot) -> str:
        domain = self._counted(snapshot)
        return "" if domain == ALL else readings.domain_name(domain)

    # ---- what is drawn

    def _draw_map(self, snapshot: Snapshot, step: Step) -> None:
        shape, frame = readings.shape(snapshot.frame), snapshot.frame
        if shape is None:
            return
        layer, counted = step.view.get("layer"), self._counted(snapshot)
        domain = step.view.get("domain", ALL) if counted == ALL else counted
        if step.view["rows"] == "layers":
            load = readings.expert_load(frame, domain)
            if load is not None:
                self.map.say(load_spec(shape.layers))
                self.map.draw(load.share_LE)
            return
        place = shape.layers.index(layer) if layer in shape.layers else None
        lines = []
        for label in readings.domains(frame):
            load = readings.expert_load(frame, label)
            if load is not None and not load.idle:
                line_E = load.share_LE.mean(axis=0) if place is None else load.share_LE[place]
                lines.append((readings.domain_name(label), line_E))
        if lines:
            rows = tuple(name for name, _ in lines)
            title = "Load by domain and expert"
            spec = replace(load_spec(shape.layers), title=title, rows=rows, row_name="domain")
            self.map.say(spec)
            self.map.draw(np.array([line for _, line in lines]))

    def _load_exhibit(self, snapshot: Snapshot, step: Step) -> None:
        """Fetch what the stepper shows, once for each visit of the presenter."""
        live = _live(snapshot)
        if live is None and _takes_texts(snapshot):
            self._have_written(step)
        if live is None or not live["exhibit"] or not self._on_live(snapshot, live):
            return
        visit = int(live["visit"])
        if visit in (self._loaded, self._loading):
            return
        self._loading = visit

        def then(answer: Mapping[str, Any]) -> None:
            self._loading = -1
            if answer["state"]:
                self._loaded = visit
                self._focus = token, layer, stage = _led(live, step)
                self.stepper.param.update(
                    state=answer["state"], token=token, layer=layer, stage=stage
                )

        self.later(lambda: self.source.control("demo_exhibit"), then)

    def _have_written(self, step: Step) -> None:
        """Let the engine write the step's text, once; show it from the step's own place."""
        text = step.view["text"]
        if text == self._asked:
            return
        self._asked = text

        def then(state: str) -> None:
            token, layer = step.view["token"], step.view["layer"]
            self.stepper.param.update(
                state=state, token=token, layer=layer, stage=STEPPER_STAGES[0]
            )

        self.later(lambda: written(self.source, text), then)

    def _here(self) -> Focus:
        return self.stepper.token, self.stepper.layer, self.stepper.stage

    def _lead_or_follow(self, snapshot: Snapshot, step: Step) -> None:
        """Send the presenter's place in the stepper to all; go there as one who follows.

        Who steps by themselves stays where they are until the presenter moves.
        """
        live = _live(snapshot)
        if live is None or self._loaded != live["visit"] or not self._on_live(snapshot, live):
            return
        here, led = self._here(), _led(live, step)
        if self._presents(live):
            if here != self._focus:
                self._focus = here
                token, layer, stage = here
                self.ask("demo_focus", key=self.key, token=token, layer=layer, stage=stage)
        elif self.own is None and led != self._focus:
            self._focus = token, layer, stage = led
            self.stepper.param.update(token=token, layer=layer, stage=stage)

    def _checks(self, snapshot: Snapshot, live: Mapping[str, Any] | None) -> dict[str, Any]:
        step = self._step(snapshot)
        if step is None:
            return {}
        shown = live["checks"] if live and self._on_live(snapshot, live) else []
        values: dict[str, Any] = {
            "checks_said": "the value with which it first held"
            if shown
            else "measured while the presenter is on this step"
            if live
            else "",
            "no_exhibit": step.view["kind"] == "stepper" and self.stepper.state != "",
            "stepper_said": "The text is being written"
            if live and self._on_live(snapshot, live)
            else "Shown while the demo is presented; the page Step works at any time",
        }
        for place, expect in enumerate(step.expect):
            check = shown[place] if place < len(shown) else None
            look = STATES[check["state"]] if check else State("muted", "·", "")
            values |= {
                f"cs{place}": look.symbol,
                f"cc{place}": f"mark tone-{look.tone}",
                f"cv{place}": measured(check) if check else readings.NOTHING,
                f"cb{place}": bounds(check if check else _wanted(expect)),
                f"cw{place}": look.word,
            }
        return values


build = builder(Demo)


def _live(snapshot: Snapshot) -> Mapping[str, Any] | None:
    """Return what the engine's process says of the demo; None where nobody presents."""
    found = readings.facts(snapshot.frame).get("demo")
    return found if isinstance(found, Mapping) else None


def _takes_texts(snapshot: Snapshot) -> bool:
    """Whether an engine runs that can be given a text; a recording cannot."""
    return "model_folder" in readings.facts(snapshot.frame) and snapshot.state not in ENDED


def _led(live: Mapping[str, Any], step: Step) -> Focus:
    """Return the place in the stepper that the presenter points at, at first the step's own."""
    focus = live["focus"] or {**step.view, "stage": STEPPER_STAGES[0]}
    return focus["token"], focus["layer"], focus["stage"]


def _wanted(expect: Expect) -> dict[str, Any]:
    """Return what `bounds` needs of an expectation that nobody has measured."""
    return {"low": expect.low, "high": expect.high, "unit": MEASURES[expect.measure].unit}


@cache
def _known(demo: str | None) -> Playlist | None:
    """Return a playlist, or the first there is; None where its file cannot be read."""
    try:
        return find(demo) if demo else next(iter(playlists()), None)
    except WorkbenchError:
        return None


def _overhead(snapshot: Snapshot) -> dict[str, Any]:
    meta = snapshot.frame.meta if snapshot.frame else {}
    times = meta.get("stage_ms") or {}
    return {
        **readings.overhead(meta.get("overhead_share")),
        "p50": readings.milliseconds(meta.get("step_p50_ms")),
        **{f"ms_{stage}": readings.number(times.get(stage), 2) for stage in STAGES},
        **{f"w_{stage}": f"flex: {times.get(stage) or 0:.4f} 1 0px" for stage in STAGES},
    }
