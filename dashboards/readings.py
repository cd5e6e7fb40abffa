"""Pure functions from a frame to what a page says: loads, words, numbers with their units."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dashboards.source import IDLE_S
from engine.events import ROUTING_STAGES, STAGES
from engine.runtime.telemetry import Message
from workbench import theme
from workbench.views import overhead_state

ALL = "all"
"""The name of all domains together."""
NOTHING = "–"
"""Shown where there is no number."""
METER_TOP = 15.0
"""The overhead meter's right end, in per cent."""

STAGE_WORDS = {
    "schedule": "choosing which sequences run in this step",
    "plan": "deciding what a draft model proposes, and what of it stays",
    "draft": "the draft model’s passes",
    "embed": "token ids to vectors",
    "attention": "the attention of all layers",
    "gate": "the product that gives each expert a logit. It is a part of the model, as the experts "
    "are, so it counts as computing; deciding begins with select",
    "select": "choosing the best experts",
    "place": "looking up which copy of an expert, and on which device",
    "sort": "putting the slots in the order of their experts",
    "dispatch": "copying each row to its experts",
    "wait": "between ranks: waiting for the slowest one",
    "transfer": "between ranks: rows on their way; in one process what little is left of that",
    "format": "choosing number formats",
    "experts": "the experts’ products",
    "combine": "weighing the experts’ outputs and adding them",
    "head": "from the last layer to a number for each token of the vocabulary",
    "sample": "choosing the next token from these",
    "postprocess": "ids to text, and looking whether a request has ended",
}
"""What each of `STAGES` spends its time on."""

COMPUTING_STAGES = ("embed", "attention", "gate", "experts", "combine", "head")


@dataclass(frozen=True, slots=True)
class Load:
    """How busy each expert is, as a multiple of its fair share of the layer's rows."""

    share_LE: npt.NDArray[np.float32]
    """1 is the fair share, 0 in an idle layer; at most E / K."""
    rows: float
    """Rows, smoothed, that the shares rest on."""
    idle: bool
    """Whether nothing has been routed of late; all shares are then 0."""


class Shape(NamedTuple):
    """What a screen needs to know of an engine before it can be laid out."""

    layers: tuple[int, ...]
    """The model's numbers of its MoE layers."""
    experts: int
    devices: int


def shape(frame: Message | None) -> Shape | None:
    """Return the engine's shape; None before it has said what it is."""
    engine = frame.meta["engine"] if frame else None
    if not engine:
        return None
    return Shape(tuple(engine["moe_layers"]), engine["num_experts"], engine["num_devices"])


def domains(frame: Message | None) -> list[str]:
    """Return the labels of the domains seen so far, in the order of their names."""
    return sorted(frame.meta["domains"]) if frame else []


def facts(frame: Message | None) -> dict[str, Any]:
    """Return what the engine's process says beside the engine's events."""
    return dict(frame.meta["facts"]) if frame else {}


def expert_load(frame: Message | None, domain: str = ALL) -> Load | None:
    """Return the load by layer and expert; None before the engine has said what it is.

    load = smoothed rows of the expert / (smoothed rows of its layer / number of experts)
    """
    if frame is None or "smoothed" not in frame.arrays:
        return None
    smoothed_GLE = frame.arrays["smoothed"]
    domains: list[str] = frame.meta["domains"]
    if domain == ALL:
        rows_LE = smoothed_GLE.sum(axis=0)
    elif domain in domains:
        rows_LE = smoothed_GLE[domains.index(domain)]
    else:
        rows_LE = np.zeros(smoothed_GLE.shape[1:], np.float32)
    top_k, experts = frame.meta["engine"]["top_k"], rows_LE.shape[1]
    rows_L1 = rows_LE.sum(axis=1, keepdims=True)
    rows = float(rows_L1.max(initial=0.0)) / top_k
    idle_s = frame.meta["idle_s"]
    if rows < 0.5 or idle_s is None or idle_s > IDLE_S:
        return Load(np.zeros_like(rows_LE), 0.0, True)
    share_LE = np.divide(rows_LE * experts, rows_L1, out=np.zeros_like(rows_LE), where=rows_L1 > 0)
    return Load(share_LE.astype(np.float32), rows, False)


def domain_name(label: str) -> str:
    """Return a domain's name for people."""
    return "All domains" if label == ALL else theme.domain_name(label)


def number(value: float | None, digits: int = 0) -> str:
    """Write a number with thin spaces between thousands, or a dash for none."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{value:,.{digits}f}".replace(",", "\u202f")


def percent(share: float | None, digits: int = 1) -> str:
    """Write a share of 0 to 1 in per cent, without the sign."""
    return number(None if share is None else 100 * share, digits)


def milliseconds(value: float | None) -> str:
    """Write a time in ms with three figures."""
    if value is None:
        return NOTHING
    return number(value, 2 if value < 10 else 1 if value < 100 else 0)


def engine_line(frame: Message | None) -> str:
    """Say in one line what runs."""
    engine = frame.meta["engine"] if frame else None
    if not engine:
        return "Waiting for the engine"
    devices = engine["num_devices"]
    parts = [
        engine["model"].rstrip("/").rsplit("/", 1)[-1],
        f"{len(engine['moe_layers'])} MoE layers × {engine['num_experts']} experts",
        f"top-{engine['top_k']}",
        f"{devices} logical device{'s' if devices != 1 else ''}",
        engine["dtype"] + (", deterministic" if engine["deterministic"] else ""),
        f"routing table v{frame.meta['table_version']}" if frame else "",
    ]
    return "  ·  ".join(parts)


def stage_kind(stage: str) -> str:
    """Say whether a stage routes, computes, or does the rest."""
    if stage in ROUTING_STAGES:
        return "routing"
    return "compute" if stage in COMPUTING_STAGES else "rest"


def stages() -> list[dict[str, str]]:
    """Return name, kind and meaning of each stage, in the order of a step."""
    return [
        {"name": name, "kind": stage_kind(name), "means": STAGE_WORDS.get(name, "")}
        for name in STAGES
    ]


def overhead(share: float | None) -> dict[str, str]:
    """Return what the overhead meter of a page says; None where no step has run of late."""
    look = None if share is None else theme.STATES[overhead_state(share)]
    width = 0.0 if share is None else min(100.0, 100 * 100 * share / METER_TOP)
    return {
        "overhead": percent(share),
        "overhead_fill": f"width: {width:.1f}%",
        "overhead_words": f"{look.symbol} {look.word}" if look else "no steps in the last 5 s",
        "overhead_class": f"tone-{look.tone}" if look else "",
        "overhead_track": f"track tone-{look.tone}" if look else "track",
    }


LEVEL_WORDS = {
    "expert": "experts",
    "precision": "number formats",
    "model": "drafts",
    "device": "devices",
}
SMALL_BATCH = 8
"""Rows a step below which deciding is dear by its nature."""


def overhead_levels(meta: Mapping[str, Any]) -> str:
    """Say what each level that decided took of a step: "experts 4.1 %, devices 1.2 %"."""
    shares = meta.get("level_share") or {}
    return ", ".join(
        f"{LEVEL_WORDS[level]} {percent(share)} %" for level, share in shares.items() if share > 0
    )


def overhead_why(meta: Mapping[str, Any]) -> dict[str, str]:
    """Say in short and in full why the overhead is above a mark, where small steps are why."""
    share, rows = meta.get("overhead_share"), meta.get("rows_per_step")
    if share is None or rows is None or overhead_state(share) == "within" or rows >= SMALL_BATCH:
        return {"overhead_why": "", "overhead_lesson": ""}
    few = f"{number(rows, 1 if rows != round(rows) else 0)} row{'' if rows == 1 else 's'} a step"
    return {
        "overhead_why": f"Small batch: {few}.",
        "overhead_lesson": f"Small batch, {few}: deciding costs one row nearly as much as thirty, "
        "so alone it costs a large share. With more requests at once the share falls.",
    }


def spark_path(values: Iterable[float], width: float = 100.0, height: float = 28.0) -> str:
    """Return the SVG path of a line through `values`, from 0 at the bottom to their maximum.

    NaN breaks the line. The newest value is at the right edge and the scale starts at 0, so that
    a small wobble looks small.
    """
    values = list(values)
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    top = max(finite) or 1.0
    step = width / max(1, len(values) - 1)
    path, pen = [], "M"
    for at, value in enumerate(values):
        if not math.isfinite(value):
            pen = "M"
            continue
        path.append(f"{pen}{at * step:.1f} {height - 1 - (height - 2) * value / top:.1f}")
        pen = "L"
    return "".join(path)
