"""What an operator has before them beside the signals: load, table, policy, engine, requests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.drills.probes import device_rows
from workbench.drills.probes_deploy import strange_names
from workbench.drills.readings import Readings

if TYPE_CHECKING:
    from engine.routing.table import RoutingTable
    from workbench.drills.deployment import Deployment
    from workbench.drills.evidence import Evidence

POLICY = ("banned", "forced", "bias", "smoothing", "capacity_factor")


def seen(deployment: Deployment, readings: Readings, evidence: Evidence) -> dict[str, Any]:
    """Return what is before an operator now, fit for JSON; no engine, no table."""
    engine, trace = deployment.engine, readings.trace
    control = {} if engine is None else engine.control.state()
    steps_ms = trace.columns["steps/duration_ms"]
    return {
        "rows": trace.num_rows,
        "most_rows": evidence.most_rows,
        "step_ms": float(np.median(steps_ms)) if len(steps_ms) else None,
        "expert_counts": trace.expert_counts().tolist(),
        "device_rows": device_rows(readings),
        "table": None if engine is None else _table(engine.table, readings.planned),
        "policy": {name: control.get(name) for name in POLICY},
        "engine": None if engine is None else engine.stats().as_dict(),
        "deployment": dict(readings.facts),
        "files": _files(readings) if deployment.has_files else None,
        "requests": {**readings.ledger, "broken": evidence.broken()},
        "changes": evidence.changes,
    }


def said(events: Sequence[Mapping[str, Any]], what: str) -> list[dict[str, Any]]:
    """Return what was said in events of one kind, by whom and when."""
    return [
        {"at_s": event["at_s"], "who": event.get("who", ""), "said": event["said"]}
        for event in events
        if event["what"] == what
    ]


def _files(readings: Readings) -> dict[str, Any]:
    """Return which files are not as published, and how many rows a unit of formats has."""
    assert readings.folder is not None
    try:
        found = json.loads((readings.folder / "precision.json").read_text("utf-8"))["unit_rows"]
    except (OSError, ValueError, LookupError, TypeError):
        found = None
    return {"strange": strange_names(readings), "unit_rows": found}


def _table(table: RoutingTable, planned: Mapping[str, object]) -> dict[str, Any]:
    return {
        "version": table.version,
        "sha256": table.sha256(),
        "planned": dict(planned),
        "phy2log": table.phy2log.tolist(),
        "log2phy": table.log2phy.tolist(),
        "num_replicas": table.num_replicas.tolist(),
        "rank_of_phy": table.rank_of_phy.tolist(),
    }
