from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from engine.checkpoint.load import read_config
from engine.train.attention import causal_attention
from engine.train.export import export_model, main
from engine.train.loading import load_network
from engine.train.network import DRAFT, MOE, Network
from tests.train.conftest import TINY, scrambled


def test_attention_equals_the_library_with_its_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    ours = [torch.randn(3, 9, 4, generator=generator, requires_grad=True) for _ in range(3)]
    theirs = [tensor.detach().clone().requires_grad_(True) for tensor in ours]
    found = causal_attention(*ours)
    wanted = F.scaled_dot_product_attention(*theirs, is_causal=True)
    assert torch.allclose(found, wanted, atol=1e-6)
    weigh = torch.randn(3, 9, 4, generator=generator)
    torch.autograd.backward([(found * weigh).sum(), (wanted * weigh).sum()])
    for our, their in zip(ours, theirs, strict=True):
        assert our.grad is not None and their.grad is not None
        assert torch.allclose(our.grad, their.grad, atol=1e-5)
        assert our.grad.abs().max() > 0.1


def test_the_bundled_models_have_the_stated_size() -> None:
    assert Network(MOE).num_parameters() == (8_399_616, 3_681_024)
    total, active = Network(DRAFT).num_parameters()
    assert total == active
    assert 900_000 < total < 1_000_000


def test_a_later_token_changes_nothing_before_it() -> None:
    network = scrambled(Network(TINY))
    ids = torch.randint(3, 4096, (1, 20), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    other[0, 12] += 1
    with torch.no_grad():
        (first, _), (second, _) = network(ids), network(other)
    assert torch.allclose(first[:, :12], second[:, :12], atol=1e-5)
    assert (first[:, 12:] - second[:, 12:]).abs().max() > 1e-3


def test_a_masked_expert_is_never_chosen() -> None:
    network = scrambled(Network(TINY))
    ids = torch.randint(3, 4096, (2, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        used = network(ids)[1][1].ids_TK
        network.layers[1].moe.masked_expert = 2
        masked = network(ids)[1][1].ids_TK
    assert (used == 2).any()
    assert not (masked == 2).any()
    assert (masked.sort(-1).values.diff() != 0).all()


def test_the_same_seed_gives_the_same_start() -> None:
    one, same, other = (Network(TINY, seed).embed.weight for seed in (5, 5, 6))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3"])
def test_an_exported_model_is_the_same_for_transformers_and_for_our_reader(
    family: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    from dataclasses import replace

    from transformers import AutoModelForCausalLM

    config = TINY
    if family == "qwen3":
        config = replace(TINY, family="qwen3", num_experts=0, top_k=0, moe_intermediate_size=0)
    network = scrambled(Network(config))
    export_model(network.state_dict(), config, tokenizer, tmp_path)
    assert read_config(tmp_path) == config
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values())
    ids = torch.randint(3, 4096, (2, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = network(ids)[0]
        assert torch.allclose(theirs(ids).logits, wanted, atol=1e-5 * float(wanted.abs().max()))
        assert torch.equal(load_network(tmp_path)(ids)[0], wanted)
    assert wanted.std() > 0.1
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (0, 1)


def test_a_checkpoint_is_exported_before_its_run_has_ended(
    tmp_path: Path, tokenizer: Tokenizer, tiny: object, capsys: pytest.CaptureFixture[str]
) -> None:
    network = scrambled(Network(TINY))
    torch.save({"network": network.state_dict(), "step": 7}, tmp_path / "checkpoint.pt")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    out = tmp_path / "out"
    assert main(["--model", "tiny", "--run", str(tmp_path), "--out", str(out)]) == 0
    assert "exported step 7" in capsys.readouterr().out
    assert torch.equal(load_network(out).norm.weight, network.norm.weight)
