"""`explain` tells what the step recorded: it agrees with the trace and with the weights."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from engine import Engine, EngineConfig, SamplingParams
from workbench import paths
from workbench.options import SHOWN_DEVICES
from workbench.trace import Recorder

PROMPT = "Wählen Sie den Befehl 12 + 30"
FOLDER = paths.model_folder(paths.DEFAULT_MODEL)


def plain_gate_logits(token_ids: list[int], config) -> list[torch.Tensor]:
    """Return each layer's (T, E) gate logits, by a forward pass written out in 64 bits."""
    weights = {name: w.double() for name, w in load_file(FOLDER / "model.safetensors").items()}
    heads, groups, width = config.num_heads, config.num_kv_heads, config.head_dim
    positions = torch.arange(len(token_ids), dtype=torch.float64)

    def norm(x, name):
        scale = (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
        return x * scale * weights[name]

    def rotate(x):
        frequency = config.rope_theta ** (-torch.arange(0, width, 2).double() / width)
        angle = (positions[:, None] * frequency).repeat(1, 2)[:, None]
        one, two = x[..., : width // 2], x[..., width // 2 :]
        return x * angle.cos() + torch.cat((-two, one), -1) * angle.sin()

    x = weights["model.embed_tokens.weight"][token_ids]
    logits = []
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}."
        h = norm(x, at + "input_layernorm.weight")
        q, k, v = (
            (h @ weights[f"{at}self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, width))
            for n in "qkv"
        )
        q = rotate(norm(q, at + "self_attn.q_norm.weight"))
        k = rotate(norm(k, at + "self_attn.k_norm.weight"))
        k, v = (t.repeat_interleave(heads // groups, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / width**0.5
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        attention = scores.masked_fill(future, -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", attention, v).flatten(1)
        x = x + mixed @ weights[at + "self_attn.o_proj.weight"].T
        h = norm(x, at + "post_attention_layernorm.weight")
        logits.append(h @ weights[at + "mlp.gate.weight"].T)
        chosen = logits[-1].softmax(-1).topk(config.top_k)
        share = chosen.values / chosen.values.sum(-1, keepdim=True)
        for row, (ids, parts) in enumerate(zip(chosen.indices.tolist(), share, strict=True)):
            for expert, part in zip(ids, parts, strict=True):
                e = f"{at}mlp.experts.{expert}."
                gate, up = (h[row] @ weights[f"{e}{n}_proj.weight"].T for n in ("gate", "up"))
                down = weights[e + "down_proj.weight"]
                x[row] += part * (torch.nn.functional.silu(gate) * up @ down.T)
    return logits


@pytest.fixture(scope="module")
def recorded():
    """The whole prompt recorded once, every token's decision in full."""
    recorder = Recorder()
    engine = Engine(EngineConfig(model=FOLDER, deterministic=True, num_devices=2), sink=recorder)
    token_ids = engine.tokenizer.encode(PROMPT)
    engine.add(token_ids, SamplingParams(max_tokens=0), watch=range(len(token_ids)))
    while engine.has_work:
        engine.step()
    yield engine, token_ids, recorder.trace()
    engine.close()


def explained(workbench, token: int, layer: int) -> dict:
    return workbench(
        "explain",
        PROMPT,
        *("--token", str(token), "--layer", str(layer)),
        *("--deterministic", "--devices", "2", "--json"),
    ).json


@pytest.mark.parametrize(("token", "layer"), [(0, 0), (3, 1), (5, 3)])
def test_it_agrees_with_the_trace_to_the_bit(workbench, recorded, token, layer):
    _, token_ids, trace = recorded
    result = explained(workbench, token, layer)
    columns = trace.columns
    assert columns["rows/positions"].tolist() == list(range(len(token_ids)))
    assert result["token"]["id"] == columns["rows/token_ids"][token] == token_ids[token]
    assert result["layer"] == layer
    for name in ("topk_ids", "topk_weights"):
        assert result[name] == columns[f"rows/{name}"][token, layer].tolist()
    assert result["margin"] == columns["rows/margins"][token, layer]
    physical = [place["physical"] for place in result["placements"]]
    assert physical == columns["rows/phy_ids"][token, layer].tolist()
    assert [place["expert"] for place in result["placements"]] == result["topk_ids"]
    devices = [trace.start.rank_of_phy[p] for p in physical]
    assert [place["device"] for place in result["placements"]] == devices
    (decision,) = (d for d in trace.decisions if (d.position, d.layer) == (token, layer))
    assert result["logits"] == decision.logits.tolist()
    assert result["scores"] == decision.scores.tolist()
    assert result["runner_up"] == decision.runner_up


def test_it_agrees_with_the_weights_worked_out_by_hand(recorded, workbench):
    engine, token_ids, trace = recorded
    config = engine.model_config
    by_hand = plain_gate_logits(token_ids, config)
    assert len(trace.decisions) == len(token_ids) * config.num_layers
    for d in trace.decisions:
        logits = by_hand[d.layer][d.position]
        scores, ranked = logits.softmax(-1).sort(descending=True)
        assert torch.tensor(d.logits).double().sub(logits).abs().max() < 1e-4
        assert d.topk_ids.tolist() == ranked[:2].tolist()
        assert d.runner_up == ranked[2]
        assert d.topk_weights.tolist() == pytest.approx(
            (scores[:2] / scores[:2].sum()).tolist(), abs=1e-5
        )
        assert d.margin == pytest.approx(float(scores[1] - scores[2]), abs=1e-5)
    result = explained(workbench, 4, 2)
    assert result["logits"] == pytest.approx(by_hand[2][4].tolist(), abs=1e-4)


def test_the_work_by_hand_would_notice_a_wrong_weight(recorded):
    engine, token_ids, trace = recorded
    by_hand = plain_gate_logits([*token_ids[:2], 7, *token_ids[3:]], engine.model_config)
    last = next(d for d in trace.decisions if (d.position, d.layer) == (5, 3))
    assert torch.tensor(last.logits).double().sub(by_hand[3][5]).abs().max() > 1e-3


def test_json_names_what_the_contract_promises(workbench):
    result = explained(workbench, 2, 1)
    assert set(result) == {
        "token",
        "layer",
        "logits",
        "scores",
        "topk_ids",
        "topk_weights",
        "runner_up",
        "margin",
        "placements",
        "table_version",
        "format",
        "format_reason",
        "unit",
        "bias",
        "smoothing",
        "shut",
        "capacity",
        "model",
        "verdict",
        "looked_up",
        "stage_ms",
        "source",
    }
    for name in ("logits", "scores", "bias", "smoothing", "shut"):
        assert len(result[name]) == 8
    assert not any(result["bias"] + result["smoothing"] + result["shut"])
    assert (result["capacity"], result["model"], result["verdict"]) == (-1, "target", "")
    assert {"gate", "select", "place", "sort", "experts"} <= set(result["stage_ms"])
    assert all(ms >= 0 for ms in result["stage_ms"].values())
    assert sum(result["topk_weights"]) == pytest.approx(1, abs=1e-6)
    assert all("device" in place["reason"] for place in result["placements"])
    assert result["source"]
    for place in result["source"]:
        file, _, line = place.rpartition(":")
        lines = (paths.root() / file).read_text(encoding="utf-8").splitlines()
        assert file.startswith("engine/") and 0 < int(line) <= len(lines)


def test_without_options_the_experts_are_on_as_many_devices_as_start_has(workbench):
    result = workbench("explain", PROMPT, "--token", "2", "--layer", "1", "--json").json
    held = 8 // SHOWN_DEVICES
    assert all(place["device"] == place["expert"] // held for place in result["placements"])


def test_the_form_for_people_shows_every_expert_and_the_lead(workbench):
    said = workbench("explain", PROMPT, "--token", "2", "--layer", "1")
    assert said.code == 0 and said.err == ""
    lines = said.out.splitlines()
    assert sum(line.startswith("chosen") for line in lines) == 2
    assert sum(line.startswith("next") for line in lines) == 1
    assert "Margin" in said.out and "engine/routing/gate.py:" in said.out


def what_if(workbench, *words):
    at = ("--token", "2", "--layer", "1", "--deterministic")
    return workbench("explain", PROMPT, *at, *words, "--json").json


def test_what_if_shows_the_other_choice_and_what_it_changes_of_the_next_token(workbench, recorded):
    engine, token_ids, _ = recorded
    plain = what_if(workbench)
    banned = plain["topk_ids"][0]
    result = what_if(workbench, "--ban-expert", str(banned), "--bias", "3=+1")
    assert banned not in result["topk_ids"] and result["scores"][banned] == 0
    assert result["bias"] == [0, 0, 0, 1, 0, 0, 0, 0]
    compared = result["what_if"]
    assert (compared["banned"], compared["forced"]) == ([banned], [])
    times = "stage_ms"
    del compared["without"][times], plain[times]
    assert compared["without"] == plain
    before = torch.from_numpy(engine.logits(token_ids)).double().softmax(-1)
    engine.control.ban_expert(None, banned)
    engine.control.set_bias(None, 3, 1.0)
    after = torch.from_numpy(engine.logits(token_ids)).double().softmax(-1)
    engine.control.clear_policy()
    for name, row in (("after_token", 2), ("after_prompt", -1)):
        side, p, q = compared[name], before[row], after[row]
        assert side["kl"] == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-6) != 0
        for shown, mine, other in (("before", p, q), ("after", q, p)):
            best = mine.argsort(descending=True)[:5].tolist()
            assert [top["id"] for top in side[shown]] == best
            assert [top["probability"] for top in side[shown]] == pytest.approx(mine[best].tolist())
            assert [top["otherwise"] for top in side[shown]] == pytest.approx(other[best].tolist())


def test_what_if_of_a_policy_that_changes_nothing_is_bitwise_the_same(workbench):
    compared = what_if(workbench, "--bias", "3=0")["what_if"]
    for name in ("after_token", "after_prompt"):
        assert compared[name]["same_logits"] and compared[name]["kl"] == 0
        assert compared[name]["before"] == compared[name]["after"]


def test_forced_experts_are_chosen_and_the_form_for_people_compares(workbench):
    result = what_if(workbench, "--force-experts", "2,5")
    assert sorted(result["topk_ids"]) == [2, 5]
    said = workbench("explain", PROMPT, "--token", "2", "--layer", "1", "--force-experts", "2,5")
    assert said.code == 0 and "Without the policy" in said.out and "KL" in said.out
    marked = [line.split()[1] for line in said.out.splitlines() if line.startswith("forced")]
    assert sorted(marked) == ["2", "5"]


@pytest.mark.parametrize("layer", [1, 2])
def test_an_expert_is_marked_as_banned_in_the_layers_it_is_banned_in(workbench, layer):
    words = ("--token", "2", "--layer", str(layer), "--ban-expert", "1:3")
    said = workbench("explain", PROMPT, *words)
    assert said.code == 0 and ("banned" in said.out) == (layer == 1)


def test_smoothing_and_capacity_stand_in_the_record(workbench):
    at = ("--token", "5", "--layer", "0", "--json")
    result = workbench("explain", PROMPT, *at, "--smoothing", "0.5,4,0.5").json
    assert set(result["smoothing"]) <= {0.0, 0.5, 0.25, 0.125, 0.0625} and any(result["smoothing"])
    assert not any(result["what_if"]["without"]["smoothing"])
    result = workbench("explain", "7 " * 40, *at, "--capacity-factor", "1").json
    assert result["capacity"] > 0


def test_a_new_token_is_explained_with_who_proposed_it_and_the_verdict(workbench):
    words = ("--layer", "1", "--max-tokens", "16", "--draft", "polyglot-draft", "--json")
    prompt = "12 * 7 = "
    plain = workbench("generate", prompt, "--max-tokens", "16", "--json").json
    first = len(plain["prompt_token_ids"])
    told = [
        workbench("explain", prompt, "--token", str(first + new), *words).json for new in (0, 5)
    ]
    for new, result in zip((0, 5), told, strict=True):
        assert result["token"]["id"] == plain["token_ids"][new]
        assert (result["model"], result["verdict"]) in {("draft", "accepted"), ("target", "")}
    banned = told[1]["topk_ids"][0]
    at = ("--token", str(first + 5), "--ban-expert", str(banned))
    result = workbench("explain", prompt, *at, *words).json
    assert banned not in result["topk_ids"]
    assert result["what_if"]["after_token"]["position"] == first + 5
    workbench("explain", prompt, "--token", str(first + 15), *words[:-1]).assert_refused(
        2, f"token ({first + 15})", "15 new ones are run"
    )


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--ban-expert", "8"), "expert (8)"),
        (("--force-experts", "1,2,3"), "top_k (2)"),
        (("--bias", "3"), "--bias (3)"),
        (("--smoothing", "0.5,0"), "window (0)"),
        (("--smoothing", "0.5,1,2"), "decay (2.0)"),
        (("--smoothing", "a"), "--smoothing (a)"),
        (("--capacity-factor", "0.5"), "capacity_factor (0.5)"),
        (("--capacity-factor", "1.5", "--deterministic"), "deterministic mode"),
    ],
)
def test_a_what_if_that_makes_no_sense_is_one_sentence(workbench, words, hint):
    at = ("--token", "0", "--layer", "0")
    workbench("explain", PROMPT, *at, *words).assert_refused(2, hint)


@pytest.mark.parametrize("token", ["-1", "99", "1000000"])
def test_a_token_out_of_range_is_refused(workbench, token):
    workbench("explain", PROMPT, "--token", token, "--layer", "0").assert_refused(
        2, f"token ({token})", "between 0 and"
    )


@pytest.mark.parametrize("layer", ["-1", "4", "1000000"])
def test_a_layer_out_of_range_is_refused(workbench, layer):
    workbench("explain", PROMPT, "--token", "0", "--layer", layer).assert_refused(
        2, f"layer ({layer})", "0 to 3"
    )


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("", "--token", "0", "--layer", "0"), "empty"),
        ((PROMPT, "--layer", "0"), "--token"),
        ((PROMPT, "--token", "0"), "--layer"),
        ((PROMPT, "--token", "one", "--layer", "0"), "one"),
        (("7" * 5000, "--token", "0", "--layer", "0"), "5001 tokens"),
    ],
)
def test_other_bad_usage_is_one_sentence(workbench, words, hint):
    workbench("explain", *words).assert_refused(2, hint)


def test_a_wrong_token_or_layer_is_refused_before_the_model_is_read(workbench, monkeypatch):
    def opened(**options):
        raise AssertionError("the engine was opened")

    monkeypatch.setattr("workbench.commands.explain.open_engine", opened)
    for token, layer, hint in ((99, 0, "token (99)"), (0, 9, "layer (9)")):
        words = ("--token", str(token), "--layer", str(layer))
        workbench("explain", PROMPT, *words).assert_refused(2, hint)
