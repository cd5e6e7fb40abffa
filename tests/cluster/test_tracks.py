"""The timeline of real ranks: every stage on its rank and stream, arrows where rows went."""

from __future__ import annotations

import pytest

from engine import Engine
from engine.events import STAGES
from tests.cluster.conftest import Heard, run
from tests.workbench.timelines import assert_valid
from workbench.trace import Recorder
from workbench.trace.chrome import BUFFERS, COMPUTE, timeline

MODES = {"grouped": {BUFFERS[0]}, "overlapped": {*BUFFERS}, "request": {*BUFFERS}}


@pytest.mark.parametrize("mode", MODES)
def test_a_run_on_ranks_becomes_a_timeline_that_obeys_the_laws(
    four: tuple[Engine, Heard], mode: str
) -> None:
    engine, heard = four
    engine.control.set_exchange(mode)
    heard.events.clear()
    run(engine, 9)
    recorder = Recorder()
    for event in (heard.start, *heard.steps()):
        recorder.emit(event)
    events = timeline(recorder.trace())["traceEvents"]
    assert_valid(events)
    steps = heard.steps()
    for rank in range(4):
        mine = [e for e in events if e["ph"] == "X" and e["pid"] == rank]
        assert {e["tid"] for e in mine} == {COMPUTE} | MODES[mode]
        names = {e["name"] for e in mine if e["tid"] == COMPUTE}
        own = {"schedule", "postprocess"}  # the controller's
        own |= {"plan", "draft", "format"}  # neither drafts nor formats are decided here
        assert names - {"step", *(f"layer {n}" for n in range(4))} == set(STAGES) - own
        for layer in range(4):
            assert sum(e["name"] == f"layer {layer}" for e in mine) == len(steps)
    arrows = [e for e in events if e["ph"] == "s" and e["cat"] == "rows"]
    pairs = {
        (rank.rank, to)
        for step in steps
        for rank in step.ranks
        for to in range(4)
        if rank.rank != to and rank.rows[to]
    }
    by_id = {e["id"]: e["pid"] for e in events if e["ph"] == "f" and e["cat"] == "rows"}
    assert {(e["pid"], by_id[e["id"]]) for e in arrows} == pairs
    for step in steps:  # what is told flight by flight adds up to what is told in sum
        for rank in step.ranks:
            out = rank.flights.rows[rank.flights.results == 0]
            assert out.sum(0).tolist() == rank.rows.tolist()
            spent = dict.fromkeys(STAGES, 0.0)
            for stage, ms in zip(rank.spans.stages, rank.spans.ms, strict=True):
                spent[STAGES[stage]] += float(ms)
            assert spent == pytest.approx(rank.stage_ms, abs=0.01)
            assert spent["transfer"] >= rank.transfer_ms - 0.01
