from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from engine.checkpoint.reader import CheckpointReader
from engine.errors import CheckpointError
from tests.checkpoint.folders import SHAPE, Tensors, random_tensors, write_folder


@pytest.fixture(params=[1, 3])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", random_tensors(SHAPE), shards=request.param)


def test_names_shapes_dtypes_and_contents_are_those_that_were_saved(folder: Path) -> None:
    tensors = random_tensors(SHAPE)
    with CheckpointReader(folder) as reader:
        assert sorted(reader.names()) == sorted(tensors)
        for name, tensor in tensors.items():
            assert reader.shape(name) == tuple(tensor.shape)
            assert reader.dtype(name) == torch.float32
            assert torch.equal(reader.get(name), tensor)
            assert reader.path_of(name).parent == folder


def test_every_number_format_keeps_its_bits(tmp_path: Path) -> None:
    tensors: Tensors = {
        "half": torch.tensor([1.5, -0.0], dtype=torch.float16),
        "brain": torch.tensor([[3.0, float("inf")]], dtype=torch.bfloat16),
        "whole": torch.tensor([-3, 2**40]),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
    }
    save_file(tensors, tmp_path / "any_name.safetensors")
    with CheckpointReader(tmp_path) as reader:
        for name, tensor in tensors.items():
            got = reader.get(name)
            assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
            assert reader.dtype(name) == tensor.dtype
            assert torch.equal(got.view(-1), tensor.view(-1))


def test_opening_a_large_file_reads_no_tensor(tmp_path: Path) -> None:
    """Half a sparse GiB: names, shapes and one small tensor come without the rest being read."""
    huge = 2**29
    header = json.dumps(
        {
            "small": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "huge": {"dtype": "F32", "shape": [huge // 4], "data_offsets": [8, 8 + huge]},
        }
    ).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + 8 + huge)
    before = psutil.Process().memory_info().rss
    with CheckpointReader(tmp_path) as reader:
        assert reader.shape("huge") == (huge // 4,)
        assert torch.equal(reader.get("small"), torch.zeros(2))
        assert psutil.Process().memory_info().rss - before < huge // 8
        # the control: using the other one does read it
        assert float(reader.get("huge").sum()) == 0.0
        assert psutil.Process().memory_info().rss - before > huge // 2


def test_an_unknown_name_is_refused(folder: Path) -> None:
    with CheckpointReader(folder) as reader:
        for ask in (reader.get, reader.shape, reader.dtype, reader.path_of):
            with pytest.raises(CheckpointError, match="there is no tensor nope in these files"):
                ask("nope")


def test_closing_twice_is_harmless_and_a_closed_reader_reads_nothing(folder: Path) -> None:
    reader = CheckpointReader(folder)
    name = reader.names()[0]
    reader.close()
    reader.close()
    with pytest.raises(AssertionError, match="the reader is closed"):
        reader.get(name)
