"""The page *Now*: rates, running texts and the live layer x expert map of one engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import panel as pn

from dashboards import readings
from dashboards.heatmap import Heatmap
from dashboards.page import Page
from dashboards.readings import ALL, Load
from dashboards.source import Snapshot, Source
from dashboards.states import STATES, overhead_limit
from engine.errors import WorkbenchError
from engine.events import STAGES

TICK_MS = 200
"""How often a session looks for news. Numbers that change faster cannot be read."""
BEAT_S = 1.0
"""A page that has nothing new is told that it is alive this often."""
NUM_SLOTS = 12
METER_TOP = 15.0
"""The overhead meter's right end, in per cent."""
VIEWS = ("map", "table")

_SKELETON = jinja2.Template(
    (Path(__file__).parent / "now.html").read_text(encoding="utf-8"), autoescape=True
)


class Now:
    """One session of the page: its component, its map, and what it showed last."""

    def __init__(
        self, source: Source, theme: str, chosen: Mapping[str, str], frame_of: Mapping[str, Any]
    ) -> None:
        self.source = source
        self.theme = theme
        self.domain = chosen.get("domain", ALL)
        self.view = chosen["view"] if chosen.get("view") in VIEWS else VIEWS[0]
        self._frame_of = frame_of
        self._notice = ""
        self._shown: tuple[int, str] | None = None
        self._shown_at = 0.0
        self._slots: list[int | None] = [None] * NUM_SLOTS
        self._map: Heatmap | None = None
        self._layout: tuple[Any, ...] = ()
        self.page = Page(self.act, sizing_mode="stretch_width")
        self._fit(source.snapshot())
        self.tick(anyway=True)

    def tick(self, *, anyway: bool = False) -> None:
        """Show what is new, unless the browser is still busy with the last."""
        if not anyway and not self.page.ready:
            return
        snapshot = self.source.snapshot()
        seq = snapshot.frame.seq if snapshot.frame else -1
        news = (seq, snapshot.state)
        if not anyway and news == self._shown and time.monotonic() - self._shown_at < BEAT_S:
            return
        self._shown, self._shown_at = news, time.monotonic()
        self._fit(snapshot)
        load = readings.expert_load(snapshot.frame, self.domain)
        if self._map is not None and self.view == "map":
            self._map.show(load)
        self.page.fill(self.values(snapshot, load))

    def act(self, name: str, value: Any) -> None:
        """Do what the reader asks for; what the page does not offer is ignored."""
        if name == "domain" and isinstance(value, str):
            self.domain = value
        elif name == "view" and value in VIEWS:
            self.view = value
        elif name == "pause":
            asyncio.get_running_loop().create_task(self._pause(value == "pause"))
            return
        self.tick(anyway=True)

    def values(self, snapshot: Snapshot, load: Load | None) -> dict[str, Any]:
        """Return everything the skeleton asks for."""
        return {
            **_status(snapshot, self._notice),
            **_rates(snapshot),
            **_stages(snapshot),
            **self._texts(snapshot),
            **self._load(snapshot, load),
        }

    def _fit(self, snapshot: Snapshot) -> None:
        """Make skeleton and map fit the engine; does nothing while its shape stays."""
        engine = snapshot.frame.meta["engine"] if snapshot.frame else None
        layers = [f"layer {n}" for n in engine["moe_layers"]] if engine else []
        experts = engine["num_experts"] if engine else 0
        known = snapshot.frame.meta["domains"] if snapshot.frame else []
        domains = [ALL, *(sorted(known)), *({self.domain} - {ALL, *known})]
        layout = (tuple(layers), experts, tuple(domains))
        if layout == self._layout:
            return
        if layers and experts and layout[:2] != self._layout[:2]:
            self._map = Heatmap(layers, experts, self.theme)
            self.page.figure = pn.pane.Bokeh(self._map.figure, sizing_mode="stretch_both")
        self._layout = layout
        self.page.skeleton = _SKELETON.render(
            **self._frame_of,
            title="Now",
            layers=layers,
            experts=experts,
            domains=[(label, readings.domain_name(label)) for label in domains],
            slots=range(NUM_SLOTS),
            stages=[{"name": stage, "kind": readings.stage_kind(stage)} for stage in STAGES],
            meter_top=METER_TOP,
        )

    def _load(self, snapshot: Snapshot, load: Load | None) -> dict[str, Any]:
        table = self.view == "table"
        values: dict[str, Any] = {
            "domain": self.domain,
            "map_pressed": "false" if table else "true",
            "table_pressed": "true" if table else "false",
            "map_hidden": table,
            "table_hidden": not table,
            "load_busy": load is not None and not load.idle,
            "load_quiet": "Waiting for the first step",
            "load_rows": "",
            "load_tip": "",
        }
        if load is None or snapshot.frame is None:
            return values
        engine = snapshot.frame.meta["engine"]
        name = readings.domain_name(self.domain)
        most = engine["num_experts"] / engine["top_k"]
        values["load_tip"] = (
            f"1× is the fair share; a top-{engine['top_k']} gate over {engine['num_experts']} "
            f"experts can reach {most:g}×."
        )
        if load.idle:
            rows = "no rows" if self.domain == ALL else f"no rows of {name}"
            values["load_quiet"] = f"{rows.capitalize()} in the last seconds: every expert is idle"
        else:
            values["load_rows"] = f"{name}: {readings.number(load.rows)} rows, smoothed"
        if table:
            for at, row in enumerate(load.share_LE.tolist()):
                values.update(
                    {f"c{at}.{e}": readings.load_word(share) for e, share in enumerate(row)}
                )
                values[f"m{at}"] = readings.NOTHING if load.idle else f"{max(row):.2f}"
        return values

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
        rest = f", {shown} shown" if shown < len(running) else ""
        values["texts_said"] = f"{len(running)} running{rest}" if running else ""
        return values

    def _free_slot(self, running: list[int]) -> int | None:
        """Return a place whose request has ended, else an empty one, so that texts stay put."""
        ended = [n for n, name in enumerate(self._slots) if name not in (None, *running)]
        empty = [n for n, name in enumerate(self._slots) if name is None]
        return next(iter(ended + empty), None)

    async def _pause(self, paused: bool) -> None:
        """Ask the engine's process to stop or resume the traffic; never blocks the page."""
        try:
            await asyncio.to_thread(self.source.control, "traffic", paused=paused)
            self._notice = ""
        except WorkbenchError as refusal:
            self._notice = str(refusal)


def build(
    source: Source, theme: str, chosen: Mapping[str, str], frame_of: Mapping[str, Any]
) -> Page:
    """Build the page for one session and start its tick."""
    session = Now(source, theme, chosen, frame_of)
    pn.state.add_periodic_callback(session.tick, period=TICK_MS)
    return session.page


def _status(snapshot: Snapshot, notice: str) -> dict[str, Any]:
    look = STATES[snapshot.state]
    facts = snapshot.frame.meta["facts"] if snapshot.frame else {}
    paused = bool(facts.get("paused"))
    return {
        "status": look.word,
        "status_symbol": look.symbol,
        "status_class": f"status tone-{look.tone}",
        "engine": readings.engine_line(snapshot.frame),
        "reason": notice or snapshot.reason,
        "pause": "resume" if paused else "pause",
        "pause_word": "Resume traffic" if paused else "Pause traffic",
        "no_pause": "paused" not in facts or snapshot.state in ("gone", "refused"),
    }


def _rates(snapshot: Snapshot) -> dict[str, Any]:
    frame = snapshot.frame
    if frame is None:
        return {}
    meta = frame.meta
    # An engine that is gone does nothing: old rates must not look like present ones.
    alive = snapshot.state not in ("connecting", "loading", "gone", "refused")
    share = meta["overhead_share"] if alive else None
    limit = overhead_limit(share) if share is not None else None
    words = f"{limit.symbol} {limit.words}" if limit else "no steps in the last 5 s"
    waiting = meta["num_waiting"]
    looking = meta["looking"] or {}
    width = 0.0 if share is None else min(100.0, 100 * 100 * share / METER_TOP)
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
        "overhead": readings.percent(share),
        "overhead_fill": f"width: {width:.1f}%",
        "overhead_words": words,
        "overhead_class": f"tone-{limit.tone}" if limit else "",
        "overhead_track": f"track tone-{limit.tone}" if limit else "track",
        "cost": readings.percent(looking.get("thread_share")),
        "viewers": looking.get("viewers", 0),
        "lost_events": looking.get("events_dropped", 0),
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
