"""Who runs and who gives way, without a model."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.runtime.scheduler import Scheduler
from tests.runtime.conftest import sequence


def ids(sequences):
    return [one.request_id for one in sequences]


def test_the_youngest_give_way_and_come_back_before_those_who_never_ran():
    scheduler = Scheduler(EngineConfig(model="none", num_blocks=3, block_size=4))
    for request_id in range(4):
        scheduler.add(sequence(request_id, 4))
    first = scheduler.schedule()
    assert ids(chunk.sequence for chunk in first.chunks) == [0, 1, 2]
    for chunk in first.chunks:
        chunk.sequence.num_computed = chunk.end
        chunk.sequence.token_ids.append(6)
    second = scheduler.schedule()
    assert ids(chunk.sequence for chunk in second.chunks) == [0]
    assert ids(second.preempted) == [2, 1]
    assert ids(scheduler.running) == [0] and ids(scheduler.waiting) == [1, 2, 3]
    assert scheduler.pools[0].num_free == 1
    assert [chunk.num_prefill for chunk in first.chunks + second.chunks] == [4, 4, 4, 0]
