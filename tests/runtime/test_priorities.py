"""Who is due first, who overtakes, who gives way, and that nobody waits for ever."""

from __future__ import annotations

import pytest

from engine import EngineConfig, SamplingParams
from engine.errors import ConfigError, RequestError
from engine.runtime.scheduler import Scheduler
from tests.runtime.conftest import sequence


def scheduler_of(**options):
    options = {"num_blocks": 64, "block_size": 4} | options
    return Scheduler(EngineConfig(model="none", **options))


def ids(sequences):
    return [one.request_id for one in sequences]


def run(scheduler):
    """Run a step in which nobody ends; returns who ran and who was preempted."""
    step = scheduler.schedule()
    for chunk in step.chunks:
        chunk.sequence.num_computed = chunk.end
        chunk.sequence.token_ids.append(6)
    return ids(chunk.sequence for chunk in step.chunks), ids(step.preempted)


def test_an_urgent_request_overtakes_those_that_wait():
    scheduler = scheduler_of(max_running=1)
    for request_id, priority in enumerate((0, 0, -1, 3)):
        scheduler.add(sequence(request_id, priority=priority))
    assert ids(scheduler.waiting) == [2, 0, 1, 3]


def test_an_urgent_request_takes_the_place_of_the_one_due_last():
    scheduler = scheduler_of(max_running=2)
    scheduler.add(sequence(0, priority=1))
    scheduler.add(sequence(1, priority=2))
    run(scheduler)
    scheduler.add(sequence(2, arrived_s=1.0))
    assert run(scheduler) == ([0, 2], [1])
    assert run(scheduler) == ([2, 0], [])


def test_an_urgent_request_takes_the_blocks_of_the_one_due_last():
    scheduler = scheduler_of(num_blocks=5)
    scheduler.add(sequence(0, 8))
    scheduler.add(sequence(1, 8, priority=1))
    run(scheduler)
    scheduler.add(sequence(2, 8, priority=-1, arrived_s=1.0))
    ran, gone = run(scheduler)
    assert gone == [1] and sorted(ran) == [0, 2]


def test_equals_take_nothing_from_each_other():
    scheduler = scheduler_of(max_running=1)
    scheduler.add(sequence(1, arrived_s=5.0))
    run(scheduler)
    scheduler.add(sequence(0, arrived_s=4.0))
    assert run(scheduler) == ([1], [])


def test_blocks_are_taken_from_the_least_urgent_first():
    scheduler = scheduler_of(num_blocks=3)
    scheduler.add(sequence(0, priority=2))
    for request_id in (1, 2):
        scheduler.add(sequence(request_id))
    assert run(scheduler) == ([1, 2, 0], [])
    ran, gone = run(scheduler)
    assert gone == [0, 2] and ran == [1]


@pytest.mark.parametrize("num_blocks", [1, 64])
def test_whoever_has_waited_long_enough_goes_before_every_newcomer(num_blocks):
    """A request of priority 1 among an endless row of priority 0, one a second."""
    scheduler = scheduler_of(max_running=1, num_blocks=num_blocks)
    low = sequence(0, 3, priority=1)
    scheduler.add(low)
    for second in range(1, 40):
        scheduler.add(sequence(second, 3, arrived_s=float(second)))
        step = scheduler.schedule()
        if step.chunks[0].sequence is low:
            break
        scheduler.remove(step.chunks[0].sequence)
    assert second in (10, 11)
    scheduler.add(sequence(99, 3, arrived_s=60.0))
    assert run(scheduler)[0] == [0]


@pytest.mark.parametrize("priority", [101, -101, 1.0, True, "0", None])
def test_a_bad_priority_is_refused(shared_engine, priority):
    with pytest.raises(RequestError, match="priority"):
        shared_engine().add([5], priority=priority)


@pytest.mark.parametrize("seconds", [0, -1, 1e9])
def test_a_bad_worth_of_a_priority_is_refused(seconds):
    with pytest.raises(ConfigError, match="priority_step_s"):
        EngineConfig(model="none", priority_step_s=seconds)


def test_the_engine_runs_the_urgent_request_first(make_engine):
    engine = make_engine(max_running=1)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    for priority in (0, 5, -5):
        engine.add([5, 6], params, label=str(priority), priority=priority)
    ended = []
    while engine.has_work:
        ended += [out.label for out in engine.step() if out.finished]
    assert ended == ["-5", "0", "5"]
