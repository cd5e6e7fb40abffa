"""Reads a model folder back into the training network, so that the report measures files."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.checkpoint.load import assignments, read_config
from engine.train.network import Network


def load_network(folder: Path) -> Network:
    """Return the network of a model folder in evaluation mode, its bf16 weights widened to fp32.

    Raises: CheckpointError when the folder is missing, damaged or does not fit its config.
    """
    config = read_config(folder)
    network = Network(config).requires_grad_(False).eval()
    state = {name: torch.full_like(tensor, torch.nan) for name, tensor in _state(network).items()}
    for assignment in assignments(folder, config):
        state[assignment.target][assignment.index] = assignment.tensor.float()
    network.load_state_dict(state)
    return network


def _state(network: Network) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = network.state_dict()
    return state
