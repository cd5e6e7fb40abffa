"""Held-out bits per byte: how well a network predicts text it has not seen, whatever the tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.train.batches import Stream, evaluation_windows
from engine.train.network import Network

WINDOWS_PER_PASS = 16


@torch.no_grad()
def bits_per_byte(
    network: Network, windows: Tensor, bytes_V: Tensor, dtype: torch.dtype = torch.bfloat16
) -> float:
    """Return the bits spent on all targets of windows [n, context + 1] per byte of their text.

    `<|eos|>` costs bits and has no bytes. Runs dropless: one domain alone would overflow the
    capacity that training batches live with.
    """
    was_training = network.training
    network.eval()
    nats = 0.0
    for part in torch.split(windows, WINDOWS_PER_PASS):
        logits, _ = network(part[:, :-1], dtype)
        nats += F.cross_entropy(
            logits.flatten(0, 1).float(), part[:, 1:].flatten(), reduction="sum"
        ).item()
    network.train(was_training)
    return nats / math.log(2) / int(bytes_V[windows[:, 1:]].sum())


def bits_by_domain(
    network: Network,
    heldout: Mapping[str, Stream],
    bytes_V: Tensor,
    *,
    num_windows: int,
    context: int = 256,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, float]:
    """Return bits per byte of every held-out stream, on up to `num_windows` windows each."""
    return {
        domain: bits_per_byte(
            network, evaluation_windows(stream, num_windows, context), bytes_V, dtype
        )
        for domain, stream in heldout.items()
    }
