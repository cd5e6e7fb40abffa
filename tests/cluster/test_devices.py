"""What ranks compute on, and what carries their rows; GPUs themselves: make gpu."""

from __future__ import annotations

import pytest
import torch

from engine.cluster.devices import check_devices, device_of
from engine.config import EngineConfig
from engine.errors import ConfigError, MachineError
from engine.exchange.group import backend_of


def on(run_on: str, ranks: int) -> EngineConfig:
    return EngineConfig(model="nowhere", run_on=run_on, num_ranks=ranks)


def test_each_rank_has_a_gpu_of_its_own_and_gpus_exchange_by_nccl() -> None:
    devices = [device_of(on("cuda", 3), rank) for rank in range(3)]
    assert devices == [torch.device("cuda", rank) for rank in range(3)]
    assert {backend_of(device) for device in devices} == {"nccl"}
    assert {device_of(on("cpu", 2), rank) for rank in range(2)} == {torch.device("cpu")}
    assert backend_of(torch.device("cpu")) == "gloo"


@pytest.mark.parametrize(
    ("gpus", "word"), [(0, "no GPU; run on"), (1, "1 GPU; .*--ranks 1"), (3, "3 GPUs; .*--ranks 3")]
)
def test_ranks_without_a_gpu_are_refused_in_a_sentence(gpus: int, word: str) -> None:
    with pytest.raises(MachineError, match=f"needs 4 GPUs.*{word}") as refused:
        check_devices(on("cuda", 4), gpus)
    assert "--run-on cpu" in str(refused.value)
    check_devices(on("cuda", 4), 4)
    check_devices(on("cpu", 4), 0)


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="run_on"):
        on("cuba", 1)
