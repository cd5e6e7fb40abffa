"""A router that has collapsed, and training the gates alone until it has not.

Nothing but the gates' matrices changes, in the weights' file of a drill's own copy of a model.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.drills.weights_file import WEIGHTS

BATCH, CONTEXT, WINDOWS = 6, 64, 8
"""Windows of a step and their tokens, and the windows that a gate is turned away by."""
LEARNING_RATE = 0.02
BALANCE = 0.5
"""Weight of the balance loss; the model was trained with 0.01."""
_CORPUS_SEED = 11


def turn_away(folder: Path, layer: int, expert: int, strength: float) -> None:
    """Turn an expert's row of a gate away from what tokens have in common.

    Args:
        folder: of the model; its weights are written over.
        layer: index among the MoE layers.
        expert: the one that is not chosen any more.
        strength: by how much its logit falls, in the mean.
    """
    network, seen = _network(folder), list[Tensor]()
    moe = network.layers[layer].moe
    hook = moe.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    with torch.no_grad():
        network(_windows(folder, 0, WINDOWS)[:, :-1])
    hook.remove()
    mean_D = seen[0].flatten(0, 1).mean(0)
    gate_ED = moe.gate.weight.detach().clone()
    gate_ED[expert] -= strength * mean_D / mean_D.square().sum()
    _write(folder, {layer: gate_ED})


def tune(folder: Path, steps: int) -> float:
    """Train the gates for some steps; return the share of tokens that the idlest expert gets."""
    from engine.train.losses import balance_loss, next_token_loss

    network = _network(folder)
    gates: dict[int, Tensor] = {
        at: layer.moe.gate.weight.requires_grad_(True) for at, layer in enumerate(network.layers)
    }
    optimizer = torch.optim.Adam(list(gates.values()), lr=LEARNING_RATE)
    routings: list[Any] = []
    for step in range(steps):
        windows = _windows(folder, step + 1, BATCH)
        logits_BTV, routings = network(windows[:, :-1])
        balance = torch.stack([balance_loss(each.logits_TE, each.ids_TK) for each in routings])
        loss: Any = next_token_loss(logits_BTV, windows[:, 1:]) + BALANCE * balance.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    _write(folder, {at: gate.detach() for at, gate in gates.items()})
    return min(_idlest(each.logits_TE, each.ids_TK) for each in routings)


def _idlest(logits_TE: Tensor, ids_TK: Tensor) -> float:
    chosen_E = torch.bincount(ids_TK.flatten(), minlength=logits_TE.shape[1])
    return float(chosen_E.min()) / len(ids_TK)


def _network(folder: Path) -> Any:
    """Load the training form of the model; Any, because its layers are not typed."""
    from engine.train.loading import load_network

    return load_network(folder)


def _windows(folder: Path, step: int, count: int) -> Tensor:
    """Draw windows (count, CONTEXT + 1) of held-out text."""
    from engine.train.batches import training_batch

    streams = _streams((folder / "tokenizer.json").read_text("utf-8"))
    return training_batch(streams, step, _CORPUS_SEED, count, CONTEXT)


@cache
def _streams(tokenizer: str) -> Any:
    """Turn the held-out texts into tokens, once."""
    from tokenizers import Tokenizer

    from engine.train.batches import token_streams

    return token_streams(Tokenizer.from_str(tokenizer), "heldout")


def _write(folder: Path, gates: dict[int, Tensor]) -> None:
    """Put the gates of some layers into the weights' file."""
    from safetensors.torch import load_file, save_file

    path = folder / WEIGHTS
    tensors = load_file(path)
    for layer, gate in gates.items():
        name = f"model.layers.{layer}.mlp.gate.weight"
        tensors[name] = gate.to(tensors[name].dtype).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
