"""Loading fills every parameter or refuses."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import Engine, EngineConfig
from engine.errors import CheckpointError
from engine.faults import Faults
from tests.runtime.conftest import MODEL


def test_no_parameter_is_left_blank(shared_engine):
    for name, parameter in shared_engine()._runner.model.named_parameters():
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


def test_a_fault_at_loading_changes_what_is_loaded():
    faults = Faults()
    faults.set("weights.load", torch.zeros_like)
    engine = Engine(EngineConfig(model=MODEL, num_blocks=16), faults=faults)
    assert (engine.logits([5, 6, 7]) == 0).all()


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(CheckpointError):
        Engine(EngineConfig(model=tmp_path / "nowhere"))
