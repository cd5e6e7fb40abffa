"""Topology files say where each figure is from, and the transfer model keeps its formula."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.exchange.topology import Topology

HARDWARE = Path(__file__).parents[2] / "data" / "hardware"
FILES = sorted(HARDWARE.glob("*.json"))


def link(name="wire", bandwidth=100, node=400, latency=2):
    figures = {"bandwidth_gbs": bandwidth, "node_gbs": node, "latency_us": latency}
    return {"name": name, **figures, "sources": dict.fromkeys(figures, "made up")}


def raw(**changes):
    """4 ranks a node on 100 GB/s; nodes share two ports of 10 GB/s."""
    figures = {"tflops": 100, "memory_gbs": 1000, "memory_gb": 80}
    return {
        "name": "small",
        "num_ranks": 8,
        "ranks_per_node": 4,
        "start_us": 8,
        "sources": {"start_us": "made up"},
        "compute": {"name": "chip", **figures, "sources": dict.fromkeys(figures, "made up")},
        "inside": link(),
        "between": link("cable", bandwidth=10, node=20, latency=5),
    } | changes


SMALL = Topology.from_mapping(raw())


def exchange(*packets, topology=SMALL):
    """Return bytes and messages of packets (source, target, bytes, messages)."""
    shape = (topology.num_ranks, topology.num_ranks)
    sizes, messages = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for source, target, num_bytes, count in packets:
        sizes[source, target] += num_bytes
        messages[source, target] += count
    return sizes, messages


def test_ranks_fill_nodes_in_order():
    assert SMALL.num_nodes == 2
    assert SMALL.node_of_rank.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert SMALL.nodes == ((0, 1, 2, 3), (4, 5, 6, 7))
    five = SMALL.for_ranks(5)
    assert five.num_nodes == 2 and five.nodes == ((0, 1, 2, 3), (4,))
    assert SMALL.for_ranks(4).num_nodes == 1


def test_a_packet_takes_start_latency_and_bytes_over_bandwidth():
    assert SMALL.packet_us(0, 1, 1_000_000) == 8 + 2 + 10
    assert SMALL.packet_us(0, 4, 1_000_000) == 8 + 5 + 100
    assert SMALL.packet_us(3, 3, 1_000_000) == 0


def test_a_port_carries_its_packets_one_after_another():
    out = SMALL.all_to_all(*exchange((0, 1, 10**6, 1), (0, 2, 10**6, 3)))
    assert out.us == 8 + (1 + 3) * 2 + 20 and out.bottleneck == "rank 0 sends over wire"
    into = SMALL.all_to_all(*exchange((1, 0, 10**6, 1), (2, 0, 10**6, 3)))
    assert into.us == out.us and into.bottleneck == "rank 0 receives over wire"


def test_ports_of_different_ranks_directions_and_links_work_at_the_same_time():
    both = SMALL.all_to_all(*exchange((0, 1, 10**6, 1), (1, 0, 10**6, 1), (2, 3, 10**6, 1)))
    assert both.us == SMALL.packet_us(0, 1, 10**6)
    mixed = SMALL.all_to_all(*exchange((0, 1, 10**6, 1), (0, 4, 10**6, 1)))
    assert mixed.us == SMALL.packet_us(0, 4, 10**6)
    assert mixed.bottleneck == "rank 0 sends over cable"


def test_ranks_of_a_node_share_what_the_node_can_carry_to_others():
    crossing = exchange(*((rank, rank + 4, 10**6, 1) for rank in range(4)))
    shared = SMALL.all_to_all(*crossing)
    assert shared.us == 8 + 4e6 / 20e3 and shared.bottleneck == "node 0 sends over cable"
    enough = Topology.from_mapping(raw(between=link("cable", bandwidth=10, node=40, latency=5)))
    assert enough.all_to_all(*crossing).us == 8 + 5 + 100


def test_one_message_for_each_token_is_dearer_than_one_packet_for_each_peer():
    rows, width, peers = 1024, 512, 7
    each = [(0, 1 + row % peers, width, 1) for row in range(rows)]
    grouped = [
        (0, 1 + peer, width * (rows // peers + (peer < rows % peers)), 1) for peer in range(7)
    ]
    naive_us, grouped_us = (SMALL.all_to_all(*exchange(*way)).us for way in (each, grouped))
    assert naive_us > 50 * grouped_us


def test_pairs_are_timed_as_if_alone_and_without_the_start():
    times = SMALL.pairs_us(*exchange((0, 1, 10**6, 2), (0, 4, 10**6, 1), (2, 2, 10**6, 1)))
    assert times[0, 1] == 4 + 10 and times[0, 4] == 5 + 100 and times.sum() == 14 + 105


@st.composite
def exchanges(draw):
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    messages = rng.integers(0, 4, (8, 8)) * (rng.random((8, 8)) < 0.5)
    return rng.integers(0, 10**7, (8, 8)) * (messages > 0), messages, rng


@settings(deadline=None)
@given(exchanges())
def test_more_bytes_or_more_messages_never_take_less_time(case):
    sizes, messages, rng = case
    before = SMALL.all_to_all(sizes, messages).us
    cell = tuple(rng.integers(0, 8, 2))
    messages[cell] += 1
    more = SMALL.all_to_all(sizes, messages).us
    assert more >= before
    sizes[cell] += 10**8
    assert SMALL.all_to_all(sizes, messages).us >= more
    busiest = np.ones((8, 8), dtype=np.int64)
    assert SMALL.all_to_all(sizes + 1, messages + busiest).us > before


@settings(deadline=None)
@given(exchanges())
def test_the_time_is_the_same_backwards_and_for_other_numbers_of_the_same_ranks(case):
    sizes, messages, rng = case
    there = SMALL.all_to_all(sizes, messages).us
    assert SMALL.all_to_all(sizes.T, messages.T).us == pytest.approx(there)
    order = np.concatenate([rng.permutation(4), 4 + rng.permutation(4)])
    renamed = np.ix_(order, order)
    assert SMALL.all_to_all(sizes[renamed], messages[renamed]).us == pytest.approx(there)


@settings(deadline=None)
@given(exchanges())
def test_an_exchange_takes_at_least_its_slowest_packets_and_at_most_all_in_turn(case):
    sizes, messages, _ = case
    pairs = SMALL.pairs_us(sizes, messages)
    total = SMALL.all_to_all(sizes, messages).us
    assert pairs.max() <= total <= SMALL.start_us + pairs.sum()


def test_nothing_sent_takes_no_time_and_what_stays_at_home_is_free():
    nothing = SMALL.all_to_all(*exchange())
    assert nothing.us == 0 and nothing.bottleneck == "nothing is sent"
    assert SMALL.all_to_all(*exchange((2, 2, 10**9, 5))).us == 0
    assert SMALL.all_to_all(*exchange((0, 1, 0, 1))).us == 8 + 2, "an empty packet is a packet"


def test_compute_takes_the_longer_of_computing_and_reading():
    assert SMALL.compute.time_us(2e8, 1e6) == 2.0
    assert SMALL.compute.time_us(1e6, 5e6) == 5.0


@pytest.mark.parametrize(
    ("sizes", "messages", "sentence"),
    [
        (np.zeros((4, 4)), np.zeros((8, 8)), r"bytes_GG \(4, 4\) must hold.*\(8, 8\)"),
        (np.zeros((8, 8)), np.full((8, 8), -1), "messages_GG"),
        (np.ones((8, 8)), np.zeros((8, 8)), "1.0 bytes go from rank 0 to rank 1 in no message"),
    ],
)
def test_an_exchange_that_cannot_be_is_refused(sizes, messages, sentence):
    with pytest.raises(ConfigError, match=sentence):
        SMALL.all_to_all(sizes, messages)


def without(part, key):
    return {name: value for name, value in part.items() if name != key}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_rank": 4}, "unknown option 'num_rank'.*did you mean 'num_ranks'"),
        ({"inside": link() | {"latency": 2}}, "'latency' for Link; did you mean 'latency_us'"),
        ({"inside": without(link(), "latency_us")}, "Link cannot be made.*latency_us"),
        ({"inside": link(latency=0)}, r"latency_us \(0\) of Link must be a number above 0"),
        ({"inside": link(bandwidth="fast")}, r"bandwidth_gbs \('fast'\)"),
        ({"inside": link(bandwidth=True)}, r"bandwidth_gbs \(True\)"),
        ({"inside": link(bandwidth=500)}, r"node_gbs \(400\) of wire must be at least"),
        ({"inside": link() | {"sources": {}}}, "bandwidth_gbs of Link has no source"),
        ({"sources": {"start_us": " "}}, "start_us of Topology has no source"),
        (
            {"sources": {"start_us": "x", "start": "y"}},
            "name no figure 'start'; did you mean 'start_us'",
        ),
        ({"inside": [1]}, r"inside \(\[1\]\) must be a JSON object"),
        ({"between": None}, "2 nodes; it needs a link 'between'"),
        ({"num_ranks": 0}, r"num_ranks \(0\) must lie between"),
        ({"ranks_per_node": 0}, r"ranks_per_node \(0\)"),
    ],
)
def test_a_file_with_a_mistake_is_refused_in_one_sentence(tmp_path, changes, sentence):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(raw(**changes)))
    with pytest.raises(ConfigError, match=sentence) as refused:
        Topology.read(path)
    assert "mine.json" in str(refused.value) and "\n" not in str(refused.value)


def test_a_file_that_is_missing_or_no_json_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read: No such file.*data/hardware"):
        Topology.read(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"name": ')
    with pytest.raises(ConfigError, match="is not JSON"):
        Topology.read(tmp_path / "half.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ConfigError, match="must be a JSON object"):
        Topology.read(tmp_path / "list.json")


@pytest.mark.parametrize("wanted", [0, 9])
def test_more_ranks_than_the_machine_has_are_refused(wanted):
    with pytest.raises(ConfigError, match=rf"ranks for 1 to 8 processes, not {wanted}"):
        SMALL.for_ranks(wanted)


def test_the_bundled_machines_are_these():
    assert [path.stem for path in FILES] == [
        "2x8xH100-ib",
        "8xH100",
        "8xH200",
        "laptop",
        "pcie-box",
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_bundled_machine_reads_and_its_readme_names_it(path):
    topology = Topology.read(path)
    assert topology.name == path.stem
    assert f"`{path.name}`" in (HARDWARE / "README.md").read_text(encoding="utf-8")


def test_bundled_machines_rank_as_they_do_in_life():
    def packet(name, target=1):
        return Topology.read(HARDWARE / f"{name}.json").packet_us(0, target, 10**8)

    assert packet("8xH100") == packet("8xH200") == packet("2x8xH100-ib")
    assert packet("8xH100") < packet("2x8xH100-ib", 8) < packet("pcie-box") < packet("laptop")
