from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine import SamplingParams
from tests.views.handmade import Row, from_steps, start, step
from workbench import views
from workbench.trace import Recorder
from workbench.views.drafts import places_of

ROWS = [
    Row(0, 4, [(0, 1)]),
    Row(0, 5, [(0, 1)]),
    Row(0, 6, [(0, 1)], cause="rejected_draft"),
    Row(1, 9, [(0, 1)]),
    Row(1, 10, [(0, 1)], cause="rejected_draft"),
    Row(2, 3, [(0, 1)]),
]
DRAFTED = [0, 1, 1, 0, 1, 0]


def drafted_trace():
    event = replace(step(start(), 0, ROWS), drafted=np.array(DRAFTED, np.uint8))
    return from_steps([event, replace(event, step=1)])


def test_acceptance_is_counted_by_place():
    frame = views.draft_acceptance(drafted_trace())
    assert frame[["place", "proposed", "accepted"]].to_numpy().tolist() == [[1, 4, 2], [2, 2, 0]]
    assert frame["acceptance"].tolist() == [0.5, 0.0]


def test_a_place_is_counted_from_the_sequences_own_token():
    assert places_of(drafted_trace()).tolist() == [0, 1, 2, 0, 1, 0] * 2


def test_a_real_draft_shows_what_the_engine_counted():
    pytest.importorskip("torch")
    from engine import Engine, EngineConfig
    from tests.runtime.conftest import DRAFT, MODEL

    recorder = Recorder()
    config = EngineConfig(
        model=MODEL, draft=DRAFT, draft_length="fixed", num_blocks=64, num_threads=1
    )
    engine = Engine(config, sink=recorder)
    (done,) = engine.generate(["12 * 7 = "], SamplingParams(max_tokens=16), label="num")
    frame = views.draft_acceptance(recorder.trace())
    assert done.draft is not None and set(frame["domain"]) == {"num"}
    assert frame["proposed"].sum() == done.draft.proposed
    assert frame["accepted"].sum() == done.draft.accepted > 0
