"""Work and waiting of ranks, on a trace small enough to count by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.events import RankEvent
from workbench import figures, views
from workbench.trace import Recorder, synthetic


def rank(number, rows, *, busy, wait, transfer=0.0, num_bytes=(0, 0), messages=(0, 0)):
    counts = [np.array(one, np.int64) for one in (rows, num_bytes, messages)]
    return RankEvent(number, "grouped", *counts, wait, transfer, busy, {})


def two_ranks(*steps):
    """Record steps of hand-made rank events."""
    recorder, start = Recorder(), synthetic.start_event()
    recorder.emit(start)
    for step, ranks in enumerate(steps):
        recorder.emit(replace(synthetic.step_event(start, step, 2), ranks=ranks))
    return recorder.trace()


def test_rows_are_those_that_arrive_and_bytes_those_that_leave():
    frame = views.rank_times(
        two_ranks(
            (
                rank(0, (3, 5), busy=6.0, wait=1.0, transfer=1.0, num_bytes=(0, 80)),
                rank(1, (2, 0), busy=4.0, wait=4.0, num_bytes=(32, 0), messages=(3, 0)),
            ),
            (rank(0, (4, 0), busy=0.0, wait=0.0),),
        )
    )
    assert frame["rows"].tolist() == [5, 5, 4], "the diagonal counts, and steps do not mix"
    assert frame["num_bytes"].tolist() == [80, 32, 0]
    assert frame["messages"].tolist() == [0, 3, 0]
    assert frame["step"].tolist() == [0, 0, 1] and frame["rank"].tolist() == [0, 1, 0]
    assert frame["utilisation"].tolist()[:2] == [0.75, 0.5]
    assert np.isnan(frame["utilisation"][2]), "a rank without time has no utilisation"


def test_a_trace_of_one_process_has_no_ranks():
    assert views.rank_times(two_ranks((), ())).empty


@pytest.mark.parametrize(("waits", "named"), [((0.0, 6.0), 1), ((6.0, 0.0), 0)])
def test_the_figure_names_the_rank_that_is_least_busy(waits, named):
    steps = [tuple(rank(n, (1, 1), busy=2.0, wait=waits[n]) for n in range(2))] * 3
    figure = figures.rank_times(views.rank_times(two_ranks(*steps)))
    assert f"least busy: rank {named}, 25 % of 8 ms" in figure.layout.title.subtitle.text
    busy, wait, _ = figure.data
    assert list(busy.x) == [2.0, 2.0] and list(wait.x) == list(waits)
