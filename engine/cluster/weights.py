"""Put a checkpoint's tensors into a model, all or one rank's share, and forget none."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import torch

from engine.checkpoint.load import assignments
from engine.cluster.experts import ExpertStore
from engine.config import ModelConfig
from engine.errors import CheckpointError
from engine.exchange.dispatch import Dispatcher, LocalDispatcher
from engine.faults import Faults
from engine.kernels.registry import Ops
from engine.model.parts import Parts
from engine.model.transformer import Transformer


def load_model(
    folder: str | Path,
    config: ModelConfig,
    ops: Ops,
    faults: Faults,
    num_positions: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    dispatcher: Dispatcher | None = None,
    store: ExpertStore | None = None,
) -> Transformer:
    """Build the model of a folder and fill it; parameters are NaN before and none may be left.

    The files are held against `config` first: one that lies about its shapes takes no memory.

    Args:
        folder: the model folder.
        config: its `config.json`.
        ops: the operations the model runs on.
        faults: its fault points.
        num_positions: longest sequence.
        dtype: of weights and activations; the gates stay in fp32.
        device: where it computes; None is the CPU.
        dispatcher: moves rows to their experts; None keeps them in this process.
        store: which experts a rank holds; None holds all.

    Raises:
        CheckpointError: a file is damaged, names do not match one to one, or a weight is NaN.
    """
    items = assignments(folder, config)
    parts = Parts(
        ops=ops,
        faults=faults,
        dispatcher=dispatcher or LocalDispatcher(ops, faults),
        num_slots=store.num_slots if store else None,
    )
    model = Transformer(config, parts, num_positions)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for item in items:
            tensor = item.tensor
            if (fault := faults.weights_load) is not None:
                tensor = fault(tensor)
            item = replace(item, tensor=tensor)
            for index, part in store.parts(item) if store else [(item.index, tensor)]:
                parameters[item.target][index].copy_(part)
    left = [name for name, parameter in parameters.items() if bool(parameter.isnan().any())]
    if left:
        raise CheckpointError(
            f"{folder} leaves NaN in {len(left)} parameters, first {left[0]}; the checkpoint is "
            "damaged, take a good copy."
        )
    model.set_dtype(dtype)
    if device is not None:
        model.to(device)
    model.refresh()
    return model


def weights_sha256(model: Transformer) -> str:
    """Hash names, formats and bytes of every parameter, in the order of their names."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        raw = parameter.detach().cpu().contiguous().view(torch.uint8)
        digest.update(raw.numpy().tobytes())
    return digest.hexdigest()
