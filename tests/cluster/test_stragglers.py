"""Who is named when ranks wait for one another."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import pytest

from engine import Engine, SamplingParams
from engine.errors import FaultError
from engine.events import STAGES, RankEvent, StepEvent
from engine.runtime.stragglers import Stragglers
from tests.cluster.conftest import Heard, run

LONG = SamplingParams(max_tokens=5, ignore_eos=True)


@pytest.mark.parametrize(
    ("point", "kind", "seconds"),
    [("experts.compute", "compute", 0.2), ("dispatch.send", "communication", 0.1)],
)
def test_a_rank_that_sleeps_is_named_with_what_it_sleeps_in(
    four: tuple[Engine, Heard], point: str, kind: str, seconds: float
) -> None:
    engine, heard = four
    engine.control.inject(point, partial(_sleep, seconds=seconds), lease_s=60, rank=1)
    heard.events.clear()
    run(engine, 8, LONG)
    engine.control.clear(point)
    named = _named(heard.steps()[:20])
    assert named is not None
    assert (named.rank, named.kind) == (1, kind)
    assert named.excess_ms > 2e3 * seconds  # in 4 layers, less what slows the others
    assert named.waited_ms > 500 * seconds


def test_nobody_is_named_on_healthy_ranks_nor_for_having_more_rows() -> None:
    equal = [_step([100, 100, 100, 100], [20.0, 21.0, 19.0, 20.0]) for _ in range(20)]
    assert _named(equal) is None
    more = [_step([100, 1000, 100, 100], [20.0, 200.0, 20.0, 20.0]) for _ in range(20)]
    assert _named(more) is None
    slow = [_step([100, 100, 100, 100], [20.0, 200.0, 20.0, 20.0]) for _ in range(20)]
    named = _named(slow)
    assert named is not None and (named.rank, named.kind) == (1, "compute")


def test_a_rank_on_which_more_tokens_live_is_not_slow() -> None:
    even, busy = [20.0] * 4, [20.0, 200.0, 20.0, 20.0]
    more = [_step([100] * 4, even, attention_ms=busy, tokens=[5, 50, 5, 5]) for _ in range(20)]
    assert _named(more) is None
    slow = [_step([100] * 4, even, attention_ms=busy, tokens=[5, 5, 5, 5]) for _ in range(20)]
    named = _named(slow)
    assert named is not None and (named.rank, named.kind) == (1, "compute")


def test_too_few_steps_name_nobody() -> None:
    assert _named([_step([9, 9, 9, 9], [1.0, 900.0, 1.0, 1.0])] * 4) is None


def test_a_fault_that_cannot_travel_is_refused(four: tuple[Engine, Heard]) -> None:
    with pytest.raises(FaultError, match="travels to other processes"):
        four[0].control.inject("experts.compute", lambda value: value, lease_s=1)


def _named(steps: list[StepEvent]) -> Any:
    watch = Stragglers()
    for step in steps:
        watch.add(step)
    return watch.named()


def _step(
    rows: list[int],
    experts_ms: list[float],
    *,
    attention_ms: list[float] | None = None,
    tokens: list[int] | None = None,
) -> StepEvent:
    """Make a step in which rank g ran `rows[g]` rows in `experts_ms[g]`.

    `tokens[g]` of all tokens live on it; as many on each when not given.
    """
    shares = np.array(tokens or [1] * len(rows)) / sum(tokens or [1] * len(rows))
    ranks = tuple(
        RankEvent(
            rank=rank,
            mode="grouped",
            rows=np.round(np.array(rows) * shares[rank]).astype(np.int64),
            num_bytes=np.zeros(len(rows), dtype=np.int64),
            messages=np.zeros(len(rows), dtype=np.int64),
            wait_ms=max(experts_ms) - experts_ms[rank],
            transfer_ms=0.0,
            busy_ms=experts_ms[rank],
            stage_ms=dict.fromkeys(STAGES, 0.0)
            | {
                "experts": experts_ms[rank],
                "attention": attention_ms[rank] if attention_ms else 1.0,
            },
        )
        for rank in range(len(rows))
    )
    none: Any = np.zeros(0)
    return StepEvent(
        0,
        0.0,
        1.0,
        0,
        1,
        0,
        0,
        none,
        none,
        none,
        none,
        none,
        none,
        none,
        none,
        none,
        {},
        0,
        ranks=ranks,
    )


def _sleep(value: Any, seconds: float) -> Any:
    time.sleep(seconds)
    return value
