"""Put a checkpoint's tensors into a model, and prove that nothing was forgotten."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from engine.checkpoint.load import assignments
from engine.config import ModelConfig
from engine.errors import CheckpointError
from engine.faults import Faults
from engine.kernels.registry import Ops
from engine.model.transformer import Transformer


def load_model(
    folder: str | Path, config: ModelConfig, ops: Ops, faults: Faults, num_positions: int
) -> Transformer:
    """Build the model of a folder and fill it; parameters are NaN before and none may be left.

    The files are held against `config` first: one that lies about its shapes takes no memory.

    Raises:
        CheckpointError: a file is damaged, names do not match one to one, or a weight is NaN.
    """
    items = assignments(folder, config)
    model = Transformer(config, ops, faults, num_positions)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for item in items:
            tensor = item.tensor
            if (fault := faults.weights_load) is not None:
                tensor = fault(tensor)
            parameters[item.target][item.index].copy_(tensor)
    left = [name for name, parameter in parameters.items() if bool(parameter.isnan().any())]
    if left:
        raise CheckpointError(
            f"{folder} leaves NaN in {len(left)} parameters, first {left[0]}; the checkpoint is "
            "damaged, take a good copy."
        )
    return model


def weights_sha256(model: Transformer) -> str:
    """Hash names, formats and bytes of every parameter, in the order of their names."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        raw = parameter.detach().cpu().contiguous().view(torch.uint8)
        digest.update(raw.numpy().tobytes())
    return digest.hexdigest()
