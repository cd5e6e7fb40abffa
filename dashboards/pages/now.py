"""The page *Now*: rates, running texts and the live layer x expert map of one engine."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dashboards import readings
from dashboards.maps import PageMap
from dashboards.readings import ALL, Load
from dashboards.session import Session, builder
from dashboards.source import ENDED, Snapshot
from engine.events import STAGES
from workbench import paths, theme
from workbench.widgets import load_spec

NUM_SLOTS = 12
VIEWS = ("map", "table")
KINDS = ("routing", "compute", "rest")
TRAFFIC_COUNTS = (1, 2, 4, 8, 16, 32)
"""Numbers of running requests to choose from."""


class Now(Session):
    """One session of the page: its map, and which text has which place."""

    title = "Now"
    template = "now.html"

    def setup(self) -> dict[str, Any]:
        """Read domain and view from the address; make the map."""
        self.domain = self.chosen.get("domain", ALL)
        view = self.chosen.get("view", VIEWS[0])
        self.view = view if view in VIEWS else VIEWS[0]
        self.map = PageMap(self.theme, self.view)
        self.map.pane.param.watch(lambda change: self._turn(change.new), "view")
        self._slots: list[int | None] = [None] * NUM_SLOTS
        return {"figure": self.map.pane}

    def layout(self, snapshot: Snapshot) -> Hashable:
        """The skeleton depends on the model's shape and on the domains there are."""
        facts = readings.facts(snapshot.frame)
        return (
            readings.shape(snapshot.frame),
            _tiny(snapshot),
            tuple(readings.domains(snapshot.frame)),
            self.domain,
            tuple(facts.get("domains", ())),
            tuple(_counts(facts)),
        )

    def parts(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return domains, places and stages."""
        facts = readings.facts(snapshot.frame)
        domains = [ALL, *readings.domains(snapshot.frame)]
        domains += {self.domain} - set(domains)
        chosen = [ALL, *facts["domains"]] if "domains" in facts else []
        return {
            "domains": [(label, readings.domain_name(label)) for label in domains],
            "traffic_domains": [(label, readings.domain_name(label)) for label in chosen],
            "traffic_counts": _counts(facts),
            "slots": range(NUM_SLOTS),
            "stages": readings.stages(),
            "kinds": [(kind, theme.STATES[kind].word) for kind in KINDS],
            "tiny": _tiny(snapshot),
            "meter_top": readings.METER_TOP,
        }

    def draw(self, snapshot: Snapshot) -> None:
        """Draw the load of the chosen domain."""
        load = readings.expert_load(snapshot.frame, self.domain)
        shape = readings.shape(snapshot.frame)
        if load is None or shape is None:
            return
        idle = "Every expert is idle"
        idle = f"Traffic is paused: {idle.lower()}" if snapshot.state == "paused" else idle
        idle = "The engine has ended" if snapshot.state in ENDED else idle
        self.map.say(replace(load_spec(shape.layers), idle=idle))
        self.map.draw(load.share_LE)

    def on_height(self, name: str, height: int) -> None:
        """Let the map fill its place."""
        self.map.fit(height)

    def on_action(self, name: str, value: Any) -> None:
        """Choose what the map counts and what is sent."""
        if name == "domain" and isinstance(value, str):
            self.domain = value
        elif name == "view" and value in VIEWS:
            self._turn(value)
        elif name == "traffic_domain" and isinstance(value, str):
            self.ask("traffic", domain=value)
        elif name == "traffic_running" and isinstance(value, str) and value.isdecimal():
            self.ask("traffic", running=int(value))

    def values(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return rates, stages, texts and what is said about the load."""
        load = readings.expert_load(snapshot.frame, self.domain)
        facts = readings.facts(snapshot.frame)
        return {
            **_rates(snapshot),
            **_stages(snapshot),
            **self._texts(snapshot),
            **_load(snapshot, load, self.domain),
            "label": snapshot.frame.meta["label"] if snapshot.frame else "",
            "domain": self.domain,
            "map_pressed": "true" if self.view == "map" else "false",
            "table_pressed": "true" if self.view == "table" else "false",
            "traffic_domain": facts.get("domain", ALL),
            "traffic_running": str(facts.get("running", "")),
        }

    def _turn(self, view: str) -> None:
        """Show map or table, whether the page or the map's own key asked."""
        self.view = view
        self.map.pane.view = view

    def _texts(self, snapshot: Snapshot) -> dict[str, Any]:
        """Give each request a place that it keeps until it leaves."""
        listed = snapshot.frame.meta["requests"] if snapshot.frame else []
        requests = {request["id"]: request for request in listed}
        self._slots = [name if name in requests else None for name in self._slots]
        running = [name for name in requests if requests[name]["state"] == "running"]
        for name in running:
            if name not in self._slots and (place := self._free_slot(running)) is not None:
                self._slots[place] = name
        values: dict[str, Any] = {}
        for slot, name in enumerate(self._slots):
            values[f"h{slot}"] = name is None
            if name is not None:
                values |= _text(slot, requests[name])
        shown = sum(name in self._slots for name in running)
        values["some_texts"] = any(name is not None for name in self._slots)
        values["texts_said"] = f"{shown} of {len(running)} shown" if shown < len(running) else ""
        return values

    def _free_slot(self, running: list[int]) -> int | None:
        """Return a place whose request has ended, else an empty one, so that texts stay put."""
        ended = [n for n, name in enumerate(self._slots) if name not in (None, *running)]
        empty = [n for n, name in enumerate(self._slots) if name is None]
        return next(iter(ended + empty), None)


build = builder(Now)


def _counts(facts: Mapping[str, Any]) -> list[int]:
    return sorted({*TRAFFIC_COUNTS, *([facts["running"]] if "running" in facts else [])})


def _tiny(snapshot: Snapshot) -> bool:
    """Say whether the engine runs the bundled model: its experts cost little beside the choice."""
    engine = snapshot.frame.meta["engine"] if snapshot.frame else None
    return engine is not None and Path(engine["model"]).name == paths.DEFAULT_MODEL


def _load(snapshot: Snapshot, load: Load | None, domain: str) -> dict[str, Any]:
    """Say what the map's numbers rest on."""
    if load is None or snapshot.frame is None:
        return {"load_rows": "", "load_tip": ""}
    engine = snapshot.frame.meta["engine"]
    name = readings.domain_name(domain)
    most = engine["num_experts"] / engine["top_k"]
    return {
        "load_tip": f"A row takes a slot at each of its {engine['top_k']} experts. "
        f"1× is the fair share; a top-{engine['top_k']} gate over "
        f"{engine['num_experts']} experts can reach {most:g}×.",
        "load_rows": f"{name}: no rows in the last seconds"
        if load.idle
        else f"{name}: {readings.number(load.rows)} rows of late",
    }


def _rates(snapshot: Snapshot) -> dict[str, Any]:
    frame = snapshot.frame
    if frame is None:
        return {}
    meta = frame.meta
    # An engine that is gone does nothing: old rates must not look like present ones.
    alive = snapshot.state not in ("connecting", "loading", *ENDED)
    share = meta["overhead_share"] if alive else None
    waiting = meta["num_waiting"]
    return {
        "tokens": readings.number(meta["generated_per_s"] if alive else None),
        "tokens_spark": readings.spark_path(p.generated_per_s for p in snapshot.history),
        "rows": readings.number(meta["rows_per_s"] if alive else None),
        "running": _running(snapshot) if alive else readings.NOTHING,
        "waiting": f"{waiting} waiting" if alive else "",
        "finished": readings.number(meta["totals"]["finished"]),
        "p50": readings.milliseconds(meta["step_p50_ms"] if alive else None),
        "p95": readings.milliseconds(meta["step_p95_ms"] if alive else None),
        "p50_spark": readings.spark_path(p.step_p50_ms for p in snapshot.history),
        "steps": readings.number(meta["steps_per_s"] if alive else None),
        **readings.overhead(share),
        "overhead_levels": readings.overhead_levels(meta) if alive else "",
        **readings.overhead_why(meta if alive else {}),
    }


def _running(snapshot: Snapshot) -> str:
    """Say how many run; the last step's number stands for nothing once it is long ago."""
    assert snapshot.frame is not None
    return "0" if snapshot.state == "idle" else str(snapshot.frame.meta["num_running"])


def _stages(snapshot: Snapshot) -> dict[str, Any]:
    times = snapshot.frame.meta["stage_ms"] if snapshot.frame else {}
    values: dict[str, Any] = {}
    for stage in STAGES:
        spent = times.get(stage)
        values[f"ms_{stage}"] = readings.number(spent, 2)
        values[f"w_{stage}"] = f"flex: {spent or 0:.4f} 1 0px"
    return values


def _text(slot: int, request: Mapping[str, Any]) -> dict[str, Any]:
    running = request["state"] == "running"
    return {
        f"s{slot}": "running" if running else "ended",
        f"l{slot}": readings.domain_name(request["label"]),
        f"n{slot}": f"{request['num_tokens']} tokens",
        f"e{slot}": "" if running else f"ended: {request['state']}",
        f"p{slot}": request["prompt"],
        f"t{slot}": request["text"],
    }
