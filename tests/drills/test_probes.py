"""Probes by hand, and that neither they nor the checks can see what a drill has broken."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import workbench.drills.checks
import workbench.drills.probes
import workbench.drills.probes_deploy
import workbench.drills.probes_service
import workbench.drills.probes_time
import workbench.drills.readings
from engine.routing.placement import contiguous, filled
from workbench.drills.checks import COULD_NOT_RUN, FAIL, PASS, judge
from workbench.drills.probes import (
    MEANINGS,
    PROBES,
    Readings,
    Unreadable,
    answers_kept,
    instances_agree,
    instances_draw_alike,
    misplaced_rows,
    route_change_rate,
    unplanned_table,
)
from workbench.drills.scenario import Call, Probe, Tolerance

MAY_IMPORT = {
    "__future__",
    "collections.abc",
    "contextlib",
    "dataclasses",
    "typing",
    "numpy",
    "engine.errors",
    "engine.routing.table",
    "workbench",
    "hashlib",
    "pathlib",
    "engine.events",
    "workbench.drills",
    "workbench.drills.probes",
    "workbench.drills.readings",
    "workbench.drills.scenario",
    "workbench.trace.schema",
    "workbench.trace.trace",
}
"""What probes and checks stand on: recorded events, tables, and themselves."""
FORBIDDEN = {"faults", "active", "control", "inject", "clear", "engine", "_faults", "_leases"}
"""Names by which a fault's own flag could be reached."""


def faults_of(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        found += [f"imports {name}" for name in names if name not in MAY_IMPORT]
        if isinstance(node, ast.Attribute) and node.attr in FORBIDDEN:
            found.append(f"reads .{node.attr}")
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "vars"):
            found.append("reaches by name")
    return found


@pytest.mark.parametrize(
    "module",
    [
        workbench.drills.checks,
        workbench.drills.probes,
        workbench.drills.probes_deploy,
        workbench.drills.probes_service,
        workbench.drills.probes_time,
        workbench.drills.readings,
    ],
)
def test_checks_and_probes_cannot_reach_a_fault(module):
    assert faults_of(Path(module.__file__).read_text("utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "from engine.faults import Faults",
        "import engine.runtime.control",
        "def probe(readings): return readings.engine.faults.active()",
        "def probe(readings): return getattr(readings, 'fau' + 'lts')",
    ],
)
def test_a_check_that_peeks_is_caught(source):
    assert faults_of(source)


def test_readings_hold_no_way_to_the_engine():
    assert {field.name for field in fields(Readings)} == {
        "trace", "table_now", "planned", "ask", "known", "facts", "ledger", "published", "folder",
        "choices", "choices_known", "units", "answered_of", "rows_of_table"
    }  # fmt: skip


def test_every_probe_says_how_its_value_is_to_be_read():
    assert set(PROBES) == set(MEANINGS)


class FakeTrace:
    """Rows of one layer and two slots."""

    def __init__(self, topk, phy=None, requests=None, version=0):
        topk = np.array(topk)[:, None]
        self.num_rows = len(topk)
        self.row_steps = np.zeros(len(topk), int)
        self.columns = {
            "rows/topk_ids": topk,
            "rows/phy_ids": topk if phy is None else np.array(phy)[:, None],
            "rows/request_ids": np.zeros(len(topk), int) if requests is None else requests,
            "rows/positions": np.arange(len(topk)),
            "steps/table_version": np.array([version]),
        }


def readings(trace, table=None, **more):
    table = table or contiguous(1, 4, 2)
    planned = {"sha256": table.sha256(), "version": table.version}
    return Readings(**{"trace": trace, "table_now": table, "planned": planned, "ask": list} | more)


def test_routes_change_when_devices_do_and_not_when_experts_do():
    # devices: experts 0 and 1 on 0, experts 2 and 3 on 1
    trace = FakeTrace([[0, 2], [1, 3], [0, 1], [1, 0], [2, 3]])
    assert route_change_rate(readings(trace), rows=5) == pytest.approx(2 / 4)
    apart = FakeTrace([[0, 1], [2, 3]], requests=np.array([0, 1]))
    assert route_change_rate(readings(apart), rows=2) == 0


def test_rows_are_misplaced_where_their_slot_holds_another_expert():
    table = filled(np.array([[3, 0, 1, 2]]), np.array([0, 0, 1, 1]), 4, 2, version=1)
    right = FakeTrace([[0, 1], [3, 2]], phy=[[1, 2], [0, 3]], version=1)
    assert misplaced_rows(readings(right, table), rows=2) == 0
    wrong = FakeTrace([[0, 1], [3, 2]], phy=[[0, 2], [0, 3]], version=1)
    assert misplaced_rows(readings(wrong, table), rows=2) == 0.25
    earlier = FakeTrace([[0, 1], [3, 2]], phy=[[0, 2], [0, 3]], version=0)
    assert misplaced_rows(readings(earlier, table), rows=2) == 0, "rows of a table before it"


def test_a_table_is_unplanned_when_its_hash_is_not_the_recorded_one():
    seen = readings(FakeTrace([[0, 1]]))
    assert unplanned_table(seen) == 0
    assert unplanned_table(readings(FakeTrace([[0, 1]]), planned={"sha256": "0"})) == 1


def test_answers_are_compared_one_by_one():
    seen = readings(FakeTrace([[0, 1]]), ask=lambda: [5, 6, 7, 8], known=(5, 6, 0, 8))
    assert answers_kept(seen) == 0.75
    with pytest.raises(Unreadable, match="no answers"):
        answers_kept(readings(FakeTrace([[0, 1]])))


def test_instances_of_other_seeds_agree_when_asked_and_not_when_drawn():
    def ask(instance=0, *, drawn=False):
        return [5, 6, 7, 8] if instance == 0 or not drawn else [5, 6, 0, 8]

    seen = readings(FakeTrace([[0, 1]]), ask=ask)
    assert instances_agree(seen) == 1 and instances_draw_alike(seen) == 0.75


def probe(func, low, high, kind="range", **arguments):
    return Probe(Call(func, func, arguments), Tolerance(kind, low, high))


def test_a_judgement_has_three_outcomes():
    seen = readings(FakeTrace([[0, 1], [2, 3]]))
    assert judge(probe("unplanned_table", 0, 0), seen, {}).outcome == PASS
    assert judge(probe("unplanned_table", 1, 1), seen, {}).outcome == FAIL
    few = judge(probe("misplaced_rows", 0, 0), seen, {})
    assert few.outcome == COULD_NOT_RUN and "only 2 of the 400 rows" in few.message
    unmeasured = judge(probe("unplanned_table", 0, 1, "relative"), seen, {})
    assert unmeasured.outcome == COULD_NOT_RUN

    def breaks():
        raise ZeroDivisionError("oh")

    broken = readings(FakeTrace([[0, 1]]), ask=breaks, known=(1,))
    verdict = judge(probe("answers_kept", 0, 1), broken, {})
    assert verdict.outcome == COULD_NOT_RUN and "probe itself failed" in verdict.message
