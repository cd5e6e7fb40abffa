"""The exchange alone: its rows add up, and what is concluded from them follows."""

from __future__ import annotations

import numpy as np
import pytest

from engine.exchange.topology import Topology
from workbench import paths
from workbench.bench import dispatch
from workbench.bench.dispatch import Sample


def laptop(ranks=2):
    return Topology.read(paths.data("hardware", "laptop.json")).for_ranks(ranks)


def test_the_crossing_is_where_grouped_stays_faster():
    assert dispatch.crossing([(2, 1.0, 1.1), (4, 1.5, 1.2), (8, 3.0, 1.3)]) == 4
    assert dispatch.crossing([(2, 1.0, 0.9), (4, 1.0, 1.2), (8, 3.0, 1.3)]) == 8
    assert dispatch.crossing([(2, 1.0, 1.0)]) is None


def test_homes_are_shared_out_and_experts_differ():
    homes_T, ids_TK = dispatch.routing(5, 2, seed=1)
    assert homes_T.tolist() == [0, 1, 0, 1, 0]
    assert ids_TK.shape == (5, 2) and (ids_TK[:, 0] != ids_TK[:, 1]).all()
    assert not np.array_equal(ids_TK, dispatch.routing(5, 2, seed=2)[1])


def test_the_modelled_time_of_two_tokens_that_change_places():
    homes_T, ids_TK = np.array([0, 1]), np.array([[4], [0]])
    # 30 us to start and 30 a message, three times; 4 experts of 8 bytes, then 1024 twice.
    wanted = (3 * 60 + (32 + 2 * 1024) / 5600) / 1e3
    for mode in ("grouped", "naive", "request"):
        assert dispatch.modelled_ms(laptop(), mode, homes_T, ids_TK) == pytest.approx(wanted)


def test_the_model_charges_naive_by_row_and_request_by_round():
    homes_T, ids_TK = dispatch.routing(64, 2, seed=0)
    grouped, naive, request, overlapped = (
        dispatch.modelled_ms(laptop(), mode, homes_T, ids_TK)
        for mode in ("grouped", "naive", "request", "overlapped")
    )
    assert grouped < overlapped < 2.1 * grouped < naive < request


def test_the_ratio_is_of_the_slowest_ranks_of_the_same_round():
    def round_(ms):
        return [Sample(ms / 2, 1, 1), Sample(ms, 1, 1)]

    samples = {("grouped", 8): [round_(1), round_(4)], ("naive", 8): [round_(8), round_(16)]}
    rows = [
        {"mode": mode, "tokens": tokens, "ms": ms}
        for tokens in (2, 8)
        for mode, ms in (("grouped", 2), ("request", 3), ("naive", 12))
    ]
    found = dispatch._findings(rows, samples, 2)
    assert found["grouped_by_naive"] == {"tokens": 8, "ratio": 0.1875, "aim": 0.125}
    assert found["crossover_tokens"] == 8 and found["small_batch_rows"] == 8
    assert dispatch._findings(rows, samples, 8)["crossover_tokens"] is None, "all sizes the same"


@pytest.mark.slow
def test_dispatch_counts_messages_and_bytes(workbench):
    words = ("--ranks", "2", "--sizes", "8,32", "--rounds", "1", "--json")
    report = workbench("bench", "dispatch", *words).json
    rows = {(row["mode"], row["tokens"]): row for row in report["rows"]}
    assert len(rows) == 4 * 5 and report["label"] == "measured"
    for tokens in (8, 32):
        homes_T, ids_TK = dispatch.routing(tokens, 2, seed=1)
        away = int((ids_TK // 4 != homes_T[:, None]).sum())
        assert rows["naive", tokens]["messages"] == 2 + 2 * away
        assert rows["grouped", tokens]["messages"] == 3 * 2
        assert rows["grouped", tokens]["bytes"] == 2 * 4 * 8 + 2 * away * 256 * 4
        assert rows["request", tokens]["messages"] > rows["grouped", tokens]["messages"]
        assert all(rows[mode, tokens]["model_ms"] > 0 for mode in ("naive", "grouped"))


@pytest.mark.parametrize(
    ("words", "hint"), [(("--ranks", "1"), "at least 2"), (("--sizes", "8,x"), "--sizes (8,x)")]
)
def test_bad_usage_of_dispatch_is_one_sentence(workbench, words, hint):
    workbench("bench", "dispatch", *words).assert_refused(2, hint)
