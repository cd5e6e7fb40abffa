"""The page *Experts*: load by layer or by domain, traffic between devices, jumps and balance.

The map is drawn from every frame; the rest from the recent past, read every `READ_EVERY_S` while
the page is open, once for all who look at it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import numpy as np

from dashboards import readings
from dashboards.digest import Digest, digest
from dashboards.maps import PageMap
from dashboards.readings import ALL
from dashboards.session import Fetched, Session, builder
from dashboards.source import Snapshot
from workbench.views import BALANCE_FORMULAS
from workbench.widgets import LOAD_TOP, MapSpec, load_spec

READ_EVERY_S = 2.0
ROWS = ("layers", "domains")
"""What the rows of the map may stand for."""
MEASURES = {
    "max_over_mean": "max ÷ mean",
    "coefficient_of_variation": "variation",
    "gini": "Gini",
    "entropy": "entropy",
    "idle_share": "idle share",
}
NUM_BANS = 6
"""Bans that are shown one by one."""
_LOAD_MARKS = ((0.0, "idle"), (1.0, "fair share"), (2.0, "2×"), (LOAD_TOP, "4× or more"))


class Experts(Session):
    """One session of the page."""

    title = "Experts"
    template = "experts.html"

    def setup(self) -> dict[str, Any]:
        """Read the view from the address; make both maps."""
        chosen = self.chosen
        self.rows = _one_of(chosen.get("rows"), ROWS)
        self.domain = chosen.get("domain", ALL)
        self.layer = chosen.get("layer", ALL)
        self.measure = _one_of(chosen.get("measure"), tuple(MEASURES))
        self.recent: Fetched[Digest] = Fetched(self, self._read, READ_EVERY_S)
        self.map = PageMap(self.theme)
        self.flow = PageMap(self.theme)
        return {"figure": self.map.pane, "second": self.flow.pane}

    def layout(self, snapshot: Snapshot) -> Hashable:
        """The skeleton depends on the model's shape and on the domains there are."""
        domains = tuple(readings.domains(snapshot.frame))
        return readings.shape(snapshot.frame), domains, self.rows, _bans(snapshot) is not None

    def parts(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return layers, domains and measures."""
        shape = readings.shape(snapshot.frame)
        labels = [ALL, *readings.domains(snapshot.frame)]
        labels += {self.domain} - set(labels)
        layers = shape.layers if shape else ()
        return {
            "rows": self.rows,
            "domains": [(label, readings.domain_name(label)) for label in labels],
            "layers": [(ALL, "All layers"), *((str(n), f"Layer {n}") for n in layers)],
            "lines": list(layers),
            "experts": range(shape.experts) if shape else (),
            "bannable": _bans(snapshot) is not None,
            "bans": range(NUM_BANS),
            "measures": list(MEASURES.items()),
        }

    def news(self, snapshot: Snapshot) -> tuple[Any, ...]:
        """Draw again also when the recent past was read anew."""
        self.recent.refresh()
        return (*super().news(snapshot), self.recent.count, self.recent.failure)

    def draw(self, snapshot: Snapshot) -> None:
        """Draw the load and the flow."""
        shape = readings.shape(snapshot.frame)
        if shape is None or snapshot.frame is None:
            return
        if self.rows == "layers":
            load = readings.expert_load(snapshot.frame, self.domain)
            if load is not None:
                self.map.say(load_spec(shape.layers))
                self.map.draw(load.share_LE)
        else:
            labels, share_GE = self._by_domain(snapshot)
            self.map.say(_domain_spec(labels))
            if len(labels):
                self.map.draw(share_GE)
        past = self.recent.value
        if past is not None:
            self.flow.say(_flow_spec(len(past.flow_DD)))
            self.flow.draw(self._flow(past))

    def on_height(self, name: str, height: int) -> None:
        """Let both maps fill their places."""
        (self.map if name == "figure" else self.flow).fit(height)

    def on_action(self, name: str, value: Any) -> None:
        """Choose what is shown."""
        if name == "rows" and value in ROWS:
            self.rows = value
        elif name == "domain" and isinstance(value, str):
            self.domain = value
        elif name == "layer" and isinstance(value, str):
            self.layer = value
        elif name == "measure" and value in tuple(MEASURES):
            self.measure = value
        elif name == "ban" and isinstance(value, dict):
            self.ask("ban", **_cell(str(value.get("layer")), str(value.get("expert"))))
        elif name == "allow":
            layer, _, expert = str(value).rpartition(":")
            self.ask("allow", **_cell(layer, expert))
        elif name == "view" and value in ("map", "table"):
            self.map.pane.view = self.flow.pane.view = value

    def values(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return what is chosen, and the numbers by layer."""
        view = self.map.pane.view
        return {
            "rows_layers": "true" if self.rows == "layers" else "false",
            "rows_domains": "true" if self.rows == "domains" else "false",
            "map_pressed": "true" if view == "map" else "false",
            "table_pressed": "true" if view == "table" else "false",
            "domain": self.domain,
            "layer": self.layer,
            "measure": self.measure,
            "formula": BALANCE_FORMULAS[self.measure],
            **self._by_layer(),
            **self._said(),
            **_ban_values(snapshot),
        }

    # ---- the recent past

    def _read(self) -> Digest:
        return digest(self.source.window())

    def _by_domain(self, snapshot: Snapshot) -> tuple[list[str], np.ndarray]:
        """Return the domains with rows of late, and (G, E) the load in the chosen layer."""
        assert snapshot.frame is not None
        at = self._layer_at(readings.shape(snapshot.frame).layers)  # type: ignore[union-attr]
        found = []
        for label in readings.domains(snapshot.frame):
            load = readings.expert_load(snapshot.frame, label)
            if load is not None and not load.idle:
                lines_LE = load.share_LE
                found.append((label, lines_LE.mean(axis=0) if at is None else lines_LE[at]))
        return [label for label, _ in found], np.array([line for _, line in found])

    def _flow(self, past: Digest) -> np.ndarray:
        """Return (D, D) per cent of each home's rows by device; NaN for a home without rows."""
        at = self._layer_at(past.layers)
        flow = past.flow_DD if at is None else past.flow_LDD[at]
        sums = flow.sum(axis=1, keepdims=True)
        return 100 * flow / np.where(sums > 0, sums, np.nan)

    def _layer_at(self, layers: tuple[int, ...]) -> int | None:
        known = {str(layer): at for at, layer in enumerate(layers)}
        return known.get(self.layer)

    def _by_layer(self) -> dict[str, Any]:
        past = self.recent.value
        if past is None:
            return {}
        experts, devices = past.balance[self.measure]
        rates, expected = past.jumps["set"]
        values: dict[str, Any] = {}
        for at in range(len(past.layers)):
            values |= {
                f"be{at}": _figure(experts[at]),
                f"bd{at}": _figure(devices[at]),
                f"jr{at}": f"{_percent(rates[at])} %",
                f"ju{at}": f"{_percent(expected[at])} %",
                f"jw{at}": f"width: {_percent(rates[at], 0.0)}%",
                f"jx{at}": f"left: {_percent(expected[at], 0.0)}%",
            }
        return values

    def _said(self) -> dict[str, Any]:
        past, ms = self.recent.value, self.source.looking_ms
        if past is None:
            return {"past": self.recent.failure or "Reading the recent past", "crossing": ""}
        lost = f"; {past.unplaced} slots under a table that is not known" if past.unplaced else ""
        rows, crossing = readings.number(past.rows), _percent(past.crossing)
        cost = f", read in {ms:.1f} ms of the engine’s process" if ms else ""
        return {
            "past": self.recent.failure or f"last {rows} rows{cost}",
            "crossing": f"{crossing} % of slots are away from their token’s home{lost}",
        }


build = builder(Experts)


def _bans(snapshot: Snapshot) -> list[list[int]] | None:
    """Return layer and expert of each ban; None where none can be made."""
    facts = snapshot.frame.meta["facts"] if snapshot.frame else {}
    return facts.get("banned")


def _cell(layer: str, expert: str) -> dict[str, int]:
    """Return what is meant by a layer and an expert; what is no number is left out: all."""
    return {
        name: int(text) for name, text in (("layer", layer), ("expert", expert)) if text.isdecimal()
    }


def _ban_values(snapshot: Snapshot) -> dict[str, Any]:
    """Return a button for each ban; one that holds in every layer is one ban.

    The value of a button is `2:5` for expert 5 in layer 2, and `5` for all layers.
    """
    bans, shape = _bans(snapshot), readings.shape(snapshot.frame)
    if bans is None or shape is None:
        return {}
    whole = [e for e in range(shape.experts) if all([n, e] in bans for n in shape.layers)]
    found = [(str(expert), f"expert {expert}, all layers") for expert in whole]
    found += [(f"{n}:{e}", f"expert {e}, layer {n}") for n, e in bans if e not in whole]
    values: dict[str, Any] = {"no_bans": not found}
    for at in range(NUM_BANS):
        value, words = found[at] if at < len(found) else ("", "")
        values |= {f"bv{at}": value, f"bw{at}": f"{words} ✕" if value else "", f"bh{at}": not value}
    more = len(found) - NUM_BANS
    return values | {"more_bans": f"and {more} more" if more > 0 else ""}


def _domain_spec(labels: list[str]) -> MapSpec:
    return MapSpec(
        title="Load by domain and expert",
        rows=tuple(readings.domain_name(label) for label in labels),
        row_name="domain",
        unit="× fair share",
        short_unit="×",
        marks=_LOAD_MARKS,
        idle="Every expert is idle",
    )


def _flow_spec(devices: int) -> MapSpec:
    return MapSpec(
        title="Slots from home to device",
        rows=tuple(str(device) for device in range(devices)),
        row_name="home",
        column_name="device",
        high=100.0,
        unit="% of the home’s slots",
        short_unit="%",
        marks=((0.0, "0 %"), (50.0, "50 %"), (100.0, "100 %")),
        idle="No slots",
    )


def _one_of(value: str | None, known: tuple[str, ...]) -> str:
    return value if value in known else known[0]


def _figure(value: float) -> str:
    return readings.number(float(value), 2)


def _percent(value: float, missing: float | None = None) -> str:
    """Write a share in per cent; `missing` stands for NaN in places where a dash cannot."""
    if missing is not None and not math.isfinite(value):
        return f"{missing:g}"
    return readings.percent(float(value))
