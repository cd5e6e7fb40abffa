"""Prefix reuse on ranks: each shares what lives in its own cache, and forgets a lost one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from engine import Engine, SamplingParams
from tests.cluster.conftest import config, hashes
from workbench.bench.recovery import rejoin

PARAMS = SamplingParams(max_tokens=2, ignore_eos=True)
PROMPT = list(range(40, 73))
"""Two full blocks of 16 and one token."""


@pytest.fixture(scope="module")
def two() -> Iterator[Engine]:
    engine = Engine(config(2, prefix_reuse=True, heartbeat_timeout_s=2.0))
    yield engine
    engine.close()


def prompts(count: int) -> list[list[int]]:
    return [PROMPT + [200 + number] * (number % 3) for number in range(count)]


@pytest.mark.parametrize("count", [1, 2, 4, 12, 40])
def test_ranks_that_reuse_have_the_logits_of_one_process_that_does_not(
    alone: Engine, two: Engine, count: int
) -> None:
    two.generate([PROMPT, PROMPT], PARAMS)
    done = two.generate(prompts(count), PARAMS)
    assert [one.reused_tokens for one in done] == [32] * count
    assert hashes(done) == hashes(alone.generate(prompts(count), PARAMS))


def test_a_lost_ranks_cache_is_not_read_after_it_came_back(alone: Engine, two: Engine) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    known = hashes(alone.generate(prompts(4), params))
    two.generate([PROMPT, PROMPT], PARAMS)
    request_ids = [two.add(prompt, params) for prompt in prompts(4)]
    for _ in range(2):
        two.step()
    os.kill(two.ranks[1], signal.SIGKILL)
    assert hashes(two.finish(request_ids)) == known
    assert set(two.ranks) == {0} and two.stats().num_kept_blocks > 0
    kept = two._scheduler.pools[1].num_kept
    rejoin(two, 1)
    again = two.generate(prompts(4), params)
    assert kept == 0 and hashes(again) == known
    assert sorted(one.reused_tokens for one in again) == [0, 0, 32, 32]
