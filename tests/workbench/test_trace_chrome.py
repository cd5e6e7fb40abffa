"""The timeline of a trace with ranks; tests/cluster holds one of real ranks to the same laws."""

from __future__ import annotations

import copy

import pytest

from engine.events import STAGES
from tests.workbench.conftest import record
from tests.workbench.timelines import assert_valid
from workbench.trace import synthetic as made
from workbench.trace.chrome import BUFFERS, COMPUTE, ENGINE, timeline


def of_ranks(num_ranks):
    start = made.start_event()
    steps = [made.step_event(start, step, 3, num_ranks=num_ranks) for step in range(3)]
    return steps, timeline(record([start, *steps]))["traceEvents"]


def test_ranks_are_processes_streams_are_threads_and_arrows_go_where_rows_went():
    steps, events = of_ranks(2)
    assert_valid(events)
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == {0, 1, ENGINE}
    assert {event["tid"] for event in slices if event["pid"] == 1} == {COMPUTE, *BUFFERS}
    stages = [e for e in slices if e["pid"] == 1 and e["tid"] == COMPUTE and e["name"] != "step"]
    layers = [event for event in stages if event["name"].startswith("layer")]
    spans = [step.ranks[1].spans for step in steps]
    assert len(stages) - len(layers) == sum(len(one.stages) for one in spans)
    arrows = {(e["pid"], e["ts"]) for e in events if e["ph"] == "s"}
    wanted = sum(
        int((rank.flights.rows[:, 1 - rank.rank] > 0).sum())
        for step in steps
        for rank in step.ranks
    )
    assert sum(event["ph"] == "s" for event in events) == wanted and len(arrows) > 0


def test_a_single_process_is_rank_0_and_old_traces_show_sums():
    steps, events = of_ranks(0)
    assert_valid(events)
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, ENGINE}
    start = made.start_event()
    for step in steps:
        step.spans = type(step.spans)(*(column[:0] for column in vars_of(step.spans)))
    old = timeline(record([start, *steps]))["traceEvents"]
    assert {event["pid"] for event in old if event["ph"] == "X"} == {ENGINE}
    assert all("sum" in e["args"]["measured"] for e in old if e.get("name") == "gate")


def vars_of(spans):
    return spans.stages, spans.begin_ms, spans.ms


@pytest.mark.parametrize("damage", ["an end is lost", "an end elsewhere", "slices cross", "own id"])
def test_the_laws_notice(damage):
    _, events = of_ranks(2)
    events = copy.deepcopy(events)
    if damage == "an end is lost":
        events.remove(next(event for event in events if event["ph"] == "f"))
    elif damage == "an end elsewhere":
        next(event for event in events if event["ph"] == "f")["ts"] += 1e9
    elif damage == "slices cross":
        mine = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (0, COMPUTE)]
        _, one, following = [e for e in mine if e["name"] in STAGES][:3]
        one["dur"] += following["dur"] / 2
    else:
        first, second = [event for event in events if event["ph"] == "s"][:2]
        second["id"] = first["id"]
    with pytest.raises(AssertionError):
        assert_valid(events)
