"""The gate's benchmark compares like with like, names its aim, and sees a wrong choice."""

from __future__ import annotations

import pytest

from workbench.bench import gate

WORDS = ("bench", "gate", "--tokens", "1,3", "--rounds", "1", "--threads", "1")


def test_every_router_is_timed_against_its_peers_at_every_size(workbench):
    report = workbench(*WORDS, "--json").json
    assert report["label"] == "measured" and report["command"].startswith("workbench bench gate")
    assert {(row["experts"], row["tokens"]) for row in report["rows"]} == {
        (experts, tokens) for experts in (8, 64, 256) for tokens in (1, 3)
    }
    assert {row["router"] for row in report["rows"]} == {"softmax", "deepseek_v3"}
    for row in report["rows"]:
        assert set(row["peers_ms"]) == {"eager", "transformers"}
        best = min(row["peers_ms"].values())
        assert row["speedup_over_best_peer"] == pytest.approx(best / row["ours_ms"], abs=0.01)
        assert 0 < row["ours_ms"] and 0 < row["ours_explained_ms"]
    worst = min(row["speedup_over_best_peer"] for row in report["rows"])
    assert report["worst_speedup"] == worst <= report["geomean_speedup"]
    assert "met" not in report["aim"], "512 tokens were not measured"


def test_the_aim_is_judged_by_the_slower_of_its_rows():
    rows = [
        {"experts": 256, "tokens": 512, "speedup_over_best_peer": speedup} for speedup in (2.5, 1.9)
    ]
    aim = gate._summary(rows)["aim"]
    assert aim["reached"] == 1.9 and aim["met"] is False
    assert gate._summary(rows[:1])["aim"]["met"] is True


def test_without_transformers_plain_torch_is_the_peer(workbench, monkeypatch):
    monkeypatch.setattr(gate, "find_spec", lambda name: None)
    report = workbench(*WORDS, "--json").json
    assert all(set(row["peers_ms"]) == {"eager"} for row in report["rows"])


def test_a_choice_that_differs_from_the_peers_stops_the_benchmark(monkeypatch):
    def shifted(*arguments, **options):
        chosen = route(*arguments, **options)
        return chosen._replace(topk_ids_TK=(chosen.topk_ids_TK + 1) % 8)

    route = gate.route
    monkeypatch.setattr(gate, "route", shifted)
    with pytest.raises(AssertionError, match="eager chose or weighed otherwise"):
        gate.run(tokens=(3,), rounds=1)


@pytest.mark.parametrize("words", [("--rounds", "0"), ("--tokens", "0"), ("--threads", "0")])
def test_numbers_below_one_are_refused(workbench, words):
    workbench("bench", "gate", *words).assert_refused(2, words[0].removeprefix("--"), " 1")
