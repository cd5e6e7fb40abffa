"""Loading fills every parameter or refuses."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import Engine, EngineConfig, SamplingParams
from engine.errors import CheckpointError, RequestError
from engine.faults import Faults
from tests.runtime.conftest import MODEL


def test_no_parameter_is_left_blank(shared_engine):
    for name, parameter in shared_engine()._runner.rank.model.named_parameters():
        assert parameter.isfinite().all(), name


def test_a_nan_in_the_file_is_refused_by_name(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    (folder / "manifest.json").unlink()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        Engine(EngineConfig(model=folder))


def changed(folder, name, **keys):
    """Copy the shipped model without its manifest and change keys of one JSON file."""
    shutil.copytree(MODEL, folder)
    (folder / "manifest.json").unlink()
    raw = json.loads((folder / name).read_text(encoding="utf-8"))
    (folder / name).write_text(json.dumps(raw | keys), encoding="utf-8")
    return folder


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "lie",
    [
        {"hidden_size": 10**9},
        {"vocab_size": 10**18},
        {"num_hidden_layers": 10**9},
        {"head_dim": 10**9},
        {"num_attention_heads": 10**9, "num_key_value_heads": 1},
        {"moe_intermediate_size": 10**12},
        {"num_local_experts": 30000, "num_experts": 30000},
    ],
)
def test_a_config_that_lies_about_sizes_is_refused_before_memory_is_taken(
    tmp_path, monkeypatch, lie
):
    monkeypatch.setattr("engine.cluster.weights.Transformer", None)
    with pytest.raises(CheckpointError, match="config"):
        Engine(EngineConfig(model=changed(tmp_path / "model", "config.json", **lie)))


@pytest.mark.timeout(20)
def test_a_lying_config_is_refused_before_any_rank_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.runtime.crew.Ranks", None)
    folder = changed(tmp_path / "model", "config.json", num_hidden_layers=10**9)
    with pytest.raises(CheckpointError, match="config"):
        Engine(EngineConfig(model=folder, num_ranks=2))


@pytest.mark.timeout(20)
def test_a_length_no_cache_could_hold_takes_no_memory(tmp_path):
    folder = changed(tmp_path / "model", "config.json", max_position_embeddings=10**12)
    engine = Engine(EngineConfig(model=folder, num_blocks=8))
    assert engine.generate(["Der"], SamplingParams(max_tokens=2, ignore_eos=True))[0].rows > 0
    full = engine.generate([[5] * 127], SamplingParams(max_tokens=1, ignore_eos=True))[0]
    assert full.finish_reason == "length", "the last position of the cache is there"


def test_a_tokenizer_with_ids_the_model_lacks_is_refused(tmp_path):
    raw = json.loads((MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    more = [*raw["added_tokens"], raw["added_tokens"][0] | {"id": 4096, "content": "Server"}]
    folder = changed(tmp_path / "model", "tokenizer.json", added_tokens=more)
    with pytest.raises(CheckpointError, match="4096"):
        Engine(EngineConfig(model=folder))


def test_a_text_of_which_the_tokenizer_leaves_nothing_is_refused(tmp_path):
    folder = changed(
        tmp_path / "model",
        "tokenizer.json",
        normalizer={"type": "Replace", "pattern": {"Regex": "."}, "content": ""},
        post_processor=None,
    )
    engine = Engine(EngineConfig(model=folder, num_blocks=8))
    with pytest.raises(RequestError, match="nothing"):
        engine.add("Der Server")
    assert not engine.has_work


def test_a_fault_at_loading_changes_what_is_loaded():
    faults = Faults()
    faults.set("weights.load", torch.zeros_like)
    engine = Engine(EngineConfig(model=MODEL, num_blocks=16), faults=faults)
    assert (engine.logits([5, 6, 7]) == 0).all()


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(CheckpointError):
        Engine(EngineConfig(model=tmp_path / "nowhere"))
