"""An engine on several ranks computes the bits of one process, whatever happens meanwhile."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

from engine import Engine, SamplingParams
from engine.errors import ConfigError, RequestError, RoutingError
from engine.routing.balance import replicated
from engine.routing.placement import filled
from engine.routing.table import RoutingTable
from tests.cluster.conftest import Heard, config, hashes, prompts, run
from workbench.bench.recovery import rejoin, strike

LONGER = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("count", [1, 2, 4, 12, 40])
def test_four_ranks_have_the_logits_of_one_process(
    alone: Engine, four: tuple[Engine, Heard], count: int
) -> None:
    assert hashes(run(four[0], count)) == hashes(run(alone, count))


@pytest.mark.parametrize("mode", ["naive", "request", "overlapped", "grouped"])
def test_every_way_to_exchange_gives_the_same_bits(
    alone: Engine, four: tuple[Engine, Heard], mode: str
) -> None:
    engine, heard = four
    engine.control.set_exchange(mode)
    heard.events.clear()
    assert hashes(run(engine, 5)) == hashes(run(alone, 5))
    assert {rank.mode for step in heard.steps() for rank in step.ranks} == {mode}


def test_grouped_messages_grow_with_ranks_and_naive_ones_with_tokens(
    four: tuple[Engine, Heard],
) -> None:
    engine, heard = four
    most = {}
    for mode in ("naive", "grouped"):
        engine.control.set_exchange(mode)
        heard.events.clear()
        run(engine, 12)
        most[mode] = max(int(rank.messages.sum()) for step in heard.steps() for rank in step.ranks)
    layers, peers = 4, 3
    assert most["grouped"] <= 3 * layers * peers  # counts, rows, results
    assert most["naive"] > 3 * most["grouped"]


def test_what_ranks_send_is_what_the_tokens_chose(four: tuple[Engine, Heard]) -> None:
    engine, heard = four
    heard.events.clear()
    run(engine, 6)
    for step in heard.steps():
        devices = engine.table.rank_of_phy[step.phy_ids]
        for rank in step.ranks:
            mine = devices[step.homes == rank.rank]
            assert rank.rows.tolist() == np.bincount(mine.ravel(), minlength=4).tolist()
            assert rank.num_bytes[rank.rank] == 0
        assert sum(int(rank.rows.sum()) for rank in step.ranks) == step.topk_ids.size


def test_a_rank_without_tokens_and_one_without_experts_take_part(
    alone: Engine, four: tuple[Engine, Heard]
) -> None:
    engine, _ = four
    before = engine.table
    owners = before.rank_of_phy.copy()
    owners[owners == 3] = 0
    _publish(engine, owners)
    assert hashes(run(engine, 1)) == hashes(run(alone, 1))  # three ranks have no token
    assert set(engine.ranks) == {0, 1, 2, 3}
    _publish(engine, before.rank_of_phy)
    assert hashes(run(engine, 3)) == hashes(run(alone, 3))


def test_a_table_published_under_load_moves_experts_and_no_bit(
    alone: Engine, four: tuple[Engine, Heard]
) -> None:
    engine, heard = four
    version = engine.table.version

    def move(step: int) -> None:
        if step == 2:
            owners = (engine.table.rank_of_phy + 1) % 4
            engine.control.publish_table(engine.table.moved(owners))

    heard.events.clear()
    assert hashes(run(engine, 6, LONGER, move)) == hashes(run(alone, 6, LONGER))
    assert engine.table.version == version + 1
    (published,) = heard.controls("publish_table")
    assert published["from_ranks"] > 0 == published["from_checkpoint"]  # every owner lives
    canary = published["canary"]
    assert canary["equal"] and canary["max_error"] == 0.0
    assert canary["num_checked"] == canary["num_moved"] == 4 * 8
    assert engine.control.state()["canary"] == canary
    assert len({found["collectives"] for found in engine.census().values()}) == 1
    assert len({step.table_version for step in heard.steps()}) == 2


def test_replicas_run_each_row_once(alone: Engine, four: tuple[Engine, Heard]) -> None:
    engine, heard = four
    before = engine.table
    load = np.arange(8, dtype=float)[::-1] + 1
    table = replicated(np.tile(load, (4, 1)), 4, version=before.version + 1)
    engine.control.publish_table(table)
    _settle(engine, table.version)
    heard.events.clear()
    assert hashes(run(engine, 6)) == hashes(run(alone, 6))
    for step in heard.steps():
        assert sum(int(rank.rows.sum()) for rank in step.ranks) == step.topk_ids.size
    back = before.moved(before.rank_of_phy, table.version + 1)
    engine.control.publish_table(back)
    _settle(engine, back.version)


def test_a_rank_that_gathers_too_slowly_costs_the_table_and_no_answer(
    alone: Engine, four: tuple[Engine, Heard]
) -> None:
    engine, heard = four
    before, turned = engine.table, (engine.table.rank_of_phy + 1) % 4
    engine.control.inject("table.stage", partial(_late, seconds=3.0), lease_s=60, rank=1)
    engine.control.publish_table(before.moved(turned))
    assert hashes(run(engine, 2, LONGER)) == hashes(run(alone, 2, LONGER))
    while not heard.controls("give_up_table"):
        engine.step()
    (given_up,) = heard.controls("give_up_table")
    assert "rank 1" in given_up["why"]
    assert engine.table is before
    engine.control.clear("table.stage")
    _publish(engine, turned)
    assert hashes(run(engine, 2)) == hashes(run(alone, 2))
    assert engine.table.rank_of_phy.tolist() == turned.tolist()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_requests_outlive_a_rank(
    alone: Engine, four: tuple[Engine, Heard], how: signal.Signals
) -> None:
    engine, heard = four
    undisturbed = alone.generate(prompts(8), LONGER)
    struck = strike(engine, heard, 2, how, prompts(8), LONGER, undisturbed)
    assert struck.same_output and struck.rows_again
    assert struck.regroup_s <= struck.recovery_s
    assert (struck.noticed_s > 1.5) == (how == signal.SIGSTOP)  # a stopped heart, within its bound
    assert set(engine.ranks) == {0, 1, 3}
    told = heard.recoveries[-1].detail
    assert list(told["lost"]) == [2] and told["rows_again"] > 0
    assert told["from_host"] > 0 == told["from_checkpoint"], "its experts were still in memory"
    assert 2 not in engine.table.rank_of_phy
    rejoin(engine, 2)
    assert set(engine.ranks) == {0, 1, 2, 3}
    assert hashes(run(engine, 8)) == hashes(run(alone, 8))
    assert 2 in engine.table.rank_of_phy


def test_a_table_whose_canary_fails_is_taken_back_and_kept_only_by_the_drills_fault(
    alone: Engine, four: tuple[Engine, Heard]
) -> None:
    engine, heard = four
    before, turned = engine.table, (engine.table.rank_of_phy + 1) % 4
    wanted = hashes(run(alone, 3))
    engine.control.inject("table.stage", _two_swapped, lease_s=60, rank=1)
    engine.control.publish_table(before.moved(turned))
    while not heard.controls("give_up_table"):
        engine.step()
    assert "canary" in heard.controls("give_up_table")[0]["why"]
    assert engine.table is before and not heard.controls("publish_table")
    assert hashes(run(engine, 3)) == wanted
    engine.control.inject("table.unsafe_publish", _always, lease_s=60)
    _publish(engine, turned)
    assert hashes(run(engine, 3)) != wanted  # what the canary is for
    assert not engine.control.state()["canary"]["equal"]
    engine.control.clear("table.stage")
    engine.control.clear("table.unsafe_publish")
    _publish(engine, before.rank_of_phy)  # held against what was right, so it mends
    assert hashes(run(engine, 3)) == wanted
    assert engine.control.state()["canary"]["equal"]


def test_attention_and_experts_on_ranks_of_their_own_and_a_drained_rank_leaves_no_process(
    alone: Engine,
) -> None:
    heard = Heard()
    engine = Engine(config(2, attention_ranks=1, exchange="overlapped"), sink=heard)
    pids = engine.ranks
    assert set(engine.table.rank_of_phy) == {1}

    def drain(step: int) -> None:
        if step == 4:
            engine.control.drain(1)

    try:
        assert hashes(run(engine, 5)) == hashes(run(alone, 5))
        assert {home for step in heard.steps() for home in step.homes} == {0}
        assert all(step.ranks[1].rows.sum() == 0 for step in heard.steps())
        assert hashes(run(engine, 4, LONGER, drain)) == hashes(run(alone, 4, LONGER))
        (drained,) = heard.controls("publish_table")
        assert set(drained["rank_of_phy"]) == {0}  # nobody else is left to hold them
        assert set(engine.ranks) == {0}
        assert not os.path.exists(f"/proc/{pids[1]}")
        assert os.path.exists(f"/proc/{pids[0]}")
        engine.control.publish_table(engine.table.moved([0, 1] * 4))  # for a rank that is gone
        run(engine, 1)
        (refused,) = heard.controls("give_up_table")
        assert "rank 1" in refused["why"]
    finally:
        engine.close()
    engine.close()
    assert not os.path.exists(f"/proc/{pids[0]}")


def test_what_ranks_cannot_do_is_said(alone: Engine, four: tuple[Engine, Heard]) -> None:
    with pytest.raises(RoutingError, match="one process"):
        alone.control.drain(0)
    with pytest.raises(ConfigError, match="rank"):
        four[0].control.drain(4)
    with pytest.raises(ConfigError, match="grouped"):
        four[0].control.set_exchange("group")
    with pytest.raises(RequestError, match="one process"):
        four[0].logits("a")
    with pytest.raises(ConfigError, match="num_devices"):
        config(2, num_devices=3)


def _two_swapped(table: RoutingTable) -> RoutingTable:
    """Let a rank gather the wrong experts: the first two it is to hold change places."""
    wrong = table.phy2log.copy()
    mine = np.flatnonzero(table.rank_of_phy == 1)[:2]
    wrong[:, mine] = wrong[:, mine[::-1]]
    return filled(wrong, table.rank_of_phy, table.num_experts, 4, version=table.version)


def _always(equal: bool) -> bool:
    return True


def _late(table: Any, seconds: float) -> Any:
    time.sleep(seconds)
    return table


def _publish(engine: Engine, owners: Any) -> None:
    table = engine.table.moved(owners)
    engine.control.publish_table(table)
    _settle(engine, table.version)


def _settle(engine: Engine, version: int) -> None:
    """Step an idle engine until a table is in force."""
    for _ in range(2000):
        engine.step()
        if engine.table.version == version:
            return
        time.sleep(0.005)
    raise AssertionError(f"table version {version} never came into force")
