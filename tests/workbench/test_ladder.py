"""The ladder: worked numbers, the laws of the model, and that the measured one adds up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.errors import ConfigError
from engine.events import RankEvent, StepEvent
from engine.exchange.topology import Topology
from engine.routing.placement import contiguous
from workbench import paths
from workbench.bench.ladder import measured, modelled
from workbench.bench.ladder.frozen import Frozen, Recorded, Shape
from workbench.bench.ladder.rungs import CONTROL, RUNGS, StepFigures, layer_rows, row

TOP = {"topology", "shape", "tokens", "rows"}
COLUMNS = {
    "name",
    "throughput_normalised",
    "comm_share",
    "messages_per_step",
    "bytes_per_step",
    "comm_ms",
    "step_p50_ms",
    "step_p99_ms",
    "utilisation",
    "max_over_mean_load",
    "same_output",
    "label",
}
NAMES = [rung.name for rung in (*RUNGS, CONTROL)]
BY_MODE = {rung.mode: rung for rung in RUNGS[:4]}

# 1 us to start, 2 us a message, 100 GB/s: 1000 bytes are 0.01 us. 1 TFLOPS, 1 GB/s.
SMALL = Topology.from_mapping(
    {
        "name": "small",
        "num_ranks": 2,
        "ranks_per_node": 2,
        "start_us": 1,
        "sources": {"start_us": "made up"},
        "compute": {
            "name": "chip",
            "tflops": 1,
            "memory_gbs": 1,
            "memory_gb": 1,
            "sources": dict.fromkeys(("tflops", "memory_gbs", "memory_gb"), "made up"),
        },
        "inside": {
            "name": "wire",
            "bandwidth_gbs": 100,
            "node_gbs": 200,
            "latency_us": 2,
            "sources": dict.fromkeys(("bandwidth_gbs", "node_gbs", "latency_us"), "made up"),
        },
    }
)
SHAPE = Shape(
    model="tiny", experts=2, top_k=1, hidden=100, expert_width=10, moe_layers=1, bytes_per_value=1
)
# Each of two ranks has one request of two tokens; all four go to the other rank's expert.
SWAP = Recorded(
    np.array([[[1]], [[1]], [[0]], [[0]]]), np.array([0, 0, 1, 1]), np.array([7, 7, 8, 8])
)


def step(mode, recorded=SWAP, machine=SMALL, shape=SHAPE):
    layers, ranks = recorded.topk_ids_TLK.shape[1], machine.num_ranks
    table = contiguous(layers, shape.experts, ranks)
    return modelled.Model(machine, shape).step(BY_MODE[mode], recorded, table)


def some(seed, tokens=64, ranks=8):
    """Tokens of requests of four, any expert as likely as another."""
    rng = np.random.default_rng(seed)
    requests_T = np.arange(tokens) // 4
    ids_TLK = np.argsort(rng.random((tokens, 2, 8)), axis=2)[..., :2]
    return Recorded(ids_TLK, requests_T % ranks, requests_T)


def large(tokens=64):
    frozen = Frozen.read(paths.data("hardware", "ladder", "frozen.json"))
    machine = Topology.read(paths.data("hardware", "8xH200.json"))
    return machine, replace(frozen, tokens=tokens, steps=2)


# Worked numbers.


def test_grouped_is_count_out_comp_and_back():
    # count: 1 + 2 + 8 bytes; out and back: 1 + 2 + 200 bytes, each 0.002 us.
    # comp: 3·100·10 weights and 2·2·100 values of rows, one byte each, at 1000 bytes a us: 3.4 us.
    found = step("grouped")
    comm, comp = (3 + 8e-5) + 2 * (3 + 2e-3), 3.4
    assert found.step_ms == pytest.approx((comm + comp) / 1e3)
    assert found.comm_ms == pytest.approx(comm / 1e3)
    assert found.compute_ms_G == pytest.approx([comp / 1e3] * 2)
    assert found.messages == 3 * 2 and found.num_bytes == 2 * 8 + 2 * 400
    assert (found.busiest_rows, found.mean_rows) == (2, 2)


def test_naive_pays_the_latency_of_every_row():
    found = step("naive")
    assert found.step_ms - step("grouped").step_ms == pytest.approx(2 * 2 / 1e3)
    assert found.messages == 2 + 2 * 4


def test_request_reads_the_weights_once_for_each_round():
    split = replace(SWAP, request_ids_T=np.array([1, 2, 3, 4]))
    one, two = step("request"), step("request", split)
    assert one.step_ms == pytest.approx(step("grouped").step_ms), "one request a rank: one round"
    comm, comp = (3 + 8e-5) + 2 * (3 + 1e-3), 3.2
    assert two.step_ms == pytest.approx(2 * (comm + comp) / 1e3)
    assert two.messages == 2 * one.messages


def test_overlapped_is_the_two_buffer_pipeline():
    # Halves of one token a rank: comm 6.00108, comp 3.2, back 3.001 each.
    comm, comp, back = 6.00108, 3.2, 3.001
    found = step("overlapped")
    assert found.step_ms == pytest.approx((comm + max(comp, comm) + max(comp, back) + back) / 1e3)
    assert found.comm_ms == pytest.approx(found.step_ms - 2 * comp / 1e3)


def test_products_count_where_they_take_longer_than_reading():
    model = modelled.Model(SMALL, SHAPE)
    table = contiguous(1, 2, 2)
    busy = model.compute_us(np.array([0, 10**6]), table)
    assert busy[0] == 0.0
    assert busy[1] == pytest.approx(max(2 * 3000 * 10**6 / 1e6, (3000 + 200 * 10**6) / 1e3))


def test_a_row_is_what_its_docstring_says():
    def took(ms, comm):
        return StepFigures(
            step_ms=ms,
            comm_ms=comm,
            messages=4,
            num_bytes=10,
            compute_ms_G=np.array([ms - comm, 1.0]),
            busiest_rows=3,
            mean_rows=2,
        )

    found = row("x", [took(4, 1), took(6, 2)], throughput=2, same_output=True, label="measured")
    assert set(found) == COLUMNS
    assert (found["comm_share"], found["comm_ms"]) == (0.3, 1.5)
    assert (found["step_p50_ms"], found["step_p99_ms"]) == (5, 5.98)
    assert found["utilisation"] == [0.7, 0.2] and found["max_over_mean_load"] == 1.5


def test_rows_are_counted_by_rank_and_layer():
    ranks_TLK = np.array([[[0, 1]], [[1, 0]]])
    assert layer_rows(ranks_TLK, np.array([0, 1]), 2).tolist() == [[2, 2]]
    dense = np.zeros((3, 0, 0), np.int64)
    assert layer_rows(dense, np.array([0, 0, 1]), 3).tolist() == [[2, 1, 0]]


# Laws.


@pytest.mark.parametrize("seed", range(4))
def test_modes_send_the_same_rows_and_compute_the_same_products(seed):
    machine, frozen = large()
    found = {mode: step(mode, some(seed), machine, frozen.shape) for mode in BY_MODE}
    assert len({one.busiest_rows for one in found.values()}) == 1
    grouped, naive = found["grouped"], found["naive"]
    assert grouped.num_bytes == naive.num_bytes
    assert grouped.compute_ms_G == pytest.approx(naive.compute_ms_G)
    assert grouped.step_ms < naive.step_ms and grouped.step_ms < found["request"].step_ms


@pytest.mark.parametrize("tokens", [1, 8, 64, 513])
def test_overlapping_never_loses_against_its_halves_in_turn(tokens):
    machine, frozen = large()
    recorded = some(tokens, tokens)
    table = contiguous(2, 8, 8)
    model = modelled.Model(machine, frozen.shape)
    for phy_TK in modelled.placed(recorded, table):
        layer = modelled.Layer(model, "overlapped", phy_TK, recorded, table)
        in_turn = sum(sum(layer._part(half)) for half in layer._halves())
        took = modelled.Layer(model, "overlapped", phy_TK, recorded, table).time_us()
        assert took <= in_turn
        comp = sum(layer._part(half)[1] for half in layer._halves())
        assert took > comp


def test_overlapping_wins_where_products_count_and_loses_where_reading_weights_does():
    machine, frozen = large()
    few, many = some(0, 64), some(0, 16384)
    shape = frozen.shape
    assert step("overlapped", few, machine, shape).step_ms > (
        step("grouped", few, machine, shape).step_ms
    )
    assert step("overlapped", many, machine, shape).step_ms < (
        step("grouped", many, machine, shape).step_ms
    )


@pytest.mark.parametrize("tokens", [64, 640])
def test_messages_are_by_peers_in_grouped_and_by_rows_in_naive(tokens):
    machine, frozen = large()
    layers, pairs = frozen.shape.moe_layers, 8 * 7
    assert step("grouped", some(1, tokens), machine, frozen.shape).messages <= 3 * pairs * layers
    naive = step("naive", some(1, tokens), machine, frozen.shape).messages
    away = 2 * 7 / 8 * tokens  # of top 2, one device of 8 is home
    assert naive == pytest.approx((pairs + 2 * away) * layers, rel=0.1)


def test_the_dense_control_does_not_communicate():
    machine, frozen = large()
    found = modelled.Model(machine, frozen.shape).dense(some(2))
    assert (found.comm_ms, found.messages, found.num_bytes) == (0.0, 0, 0)
    assert found.step_ms == pytest.approx(found.compute_ms_G.max())


def test_layers_of_the_model_take_the_recorded_ones_in_turn():
    machine, frozen = large()
    once = step("grouped", some(3), machine, replace(frozen.shape, moe_layers=2))
    whole = step("grouped", some(3), machine, replace(frozen.shape, moe_layers=32))
    assert whole.step_ms == pytest.approx(16 * once.step_ms)
    assert whole.messages == 16 * once.messages


# The reports.


def test_the_modelled_report_has_the_keys_and_is_the_same_every_time():
    machine, frozen = large(tokens=96)
    found = modelled.report(machine, frozen)
    assert set(found) == TOP and found["topology"] == "8xH200" and found["tokens"] == 96
    assert [one["name"] for one in found["rows"]] == NAMES
    for one in found["rows"]:
        assert set(one) == COLUMNS and one["label"] == "modelled" and one["same_output"] is None
        assert len(one["utilisation"]) == 8 and all(0 <= u <= 1 for u in one["utilisation"])
        assert 0 <= one["comm_share"] < 1 and one["max_over_mean_load"] >= 1
        assert one["step_p50_ms"] <= one["step_p99_ms"]
    by_name = {one["name"]: one for one in found["rows"]}
    assert by_name["request-level"]["throughput_normalised"] == 1.0
    assert by_name["token naive"]["bytes_per_step"] == by_name["token grouped"]["bytes_per_step"]
    assert by_name["dense control"]["messages_per_step"] == 0
    assert modelled.report(machine, frozen) == found


def test_the_frozen_file_gives_a_reason_for_every_value():
    frozen = Frozen.read(paths.data("hardware", "ladder", "frozen.json"))
    assert set(frozen.sources) | {"sources"} == set(Frozen.__dataclass_fields__)


def test_a_rank_step_is_communication_and_computing():
    def rank(number, stages, sent):
        return RankEvent(
            number, "grouped", np.array([2, 2]), np.array(sent), np.array([1, 1]), 0, 0, 0, stages
        )

    event = StepEvent(
        step=0,
        time_s=0,
        duration_ms=10,
        table_version=0,
        num_running=1,
        num_waiting=0,
        num_prefill_rows=0,
        request_ids=np.zeros(2, np.int64),
        positions=np.zeros(2, np.int32),
        token_ids=np.zeros(2, np.int32),
        homes=np.array([0, 1], np.int16),
        causes=np.zeros(2, np.uint8),
        topk_ids=np.array([[[0]], [[0]]], np.int16),
        phy_ids=np.array([[[0]], [[0]]], np.int16),
        topk_weights=np.ones((2, 1, 1), np.float32),
        margins=np.ones((2, 1), np.float32),
        stage_ms={},
        bad_rows=0,
        ranks=(
            rank(0, {"dispatch": 1, "wait": 1, "experts": 3}, [0, 80]),
            rank(1, {"transfer": 3, "combine": 1, "attention": 2}, [40, 0]),
        ),
    )
    found = measured.figures(event, np.array([1, 0]))
    assert found.step_ms == 10 and found.comm_ms == 3 and found.compute_ms_G.tolist() == [3, 2]
    assert (found.messages, found.num_bytes) == (4, 120)
    assert (found.busiest_rows, found.mean_rows) == (2, 1), "both rows on rank 1, where expert 0 is"


@pytest.mark.slow
def test_the_measured_report_has_the_keys_and_equal_bits_on_every_rung(workbench):
    words = ("--ranks", "2", "--requests", "6", "--tokens", "4", "--rounds", "1")
    found = workbench("experiment", "ladder", *words, "--deterministic", "--json").json
    assert set(found) == TOP and found["shape"]["experts"] == 8
    assert [one["name"] for one in found["rows"]] == NAMES
    for one in found["rows"]:
        assert set(one) == COLUMNS and one["label"] == "measured"
        assert len(one["utilisation"]) == 2 and all(0 < u <= 1 for u in one["utilisation"])
        assert one["same_output"] or one["name"] == "+ smoothing"
    by_name = {one["name"]: one for one in found["rows"]}
    assert by_name["request-level"]["throughput_normalised"] == 1.0
    assert (
        by_name["token naive"]["messages_per_step"]
        > (by_name["token grouped"]["messages_per_step"])
    )
    control = by_name["dense control"]
    assert (control["comm_ms"], control["messages_per_step"], control["bytes_per_step"]) == (0,) * 3


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--ranks", "1"), "ranks (1)"),
        (("--ranks", "2", "--devices", "8"), "--ranks (2)"),
        (("--ranks", "2", "--rounds", "0"), "at least 1"),
        (("--topology", "8xH300"), "8xH300"),
        (("--devices", "9"), "not 9"),
        (("--step-tokens", "0"), "tokens (0)"),
    ],
)
def test_bad_usage_of_the_ladder_is_one_sentence(workbench, words, hint):
    workbench("experiment", "ladder", *words).assert_refused(2, hint)


def test_a_shape_whose_experts_are_not_the_bundled_models_is_refused():
    machine, frozen = large(tokens=8)
    other = replace(frozen, shape=replace(frozen.shape, experts=16))
    with pytest.raises(ConfigError, match="must be the bundled model's, 8 and 2"):
        modelled.report(machine, other)
