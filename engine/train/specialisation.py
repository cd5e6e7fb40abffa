"""What the experts specialise in: their use by domain, what that use tells, what masking one costs.

Counts are taken per window of held-out text, so that the permutation test can shuffle the domains
of whole windows: tokens of one window are not independent, windows of different documents are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.train.evaluate import WINDOWS_PER_PASS, bits_per_byte
from engine.train.network import MoE, Network

Counts = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Information:
    """Mutual information of domain and expert in one layer."""

    bits: float
    """At most log2 of the number of domains (3 for eight)."""
    p_value: float
    """Share of shuffles, the true labels among them, that reach as many bits."""
    num_shuffles: int


@torch.no_grad()
def expert_counts(network: Network, windows: Tensor, dtype: torch.dtype = torch.bfloat16) -> Counts:
    """Count the slots of every expert per window: [n windows, L, E]; rows sum to context x K."""
    network.eval()
    counts = []
    for part in torch.split(windows, WINDOWS_PER_PASS):
        _, routings = network(part[:, :-1], dtype)
        layers = [
            torch.nn.functional.one_hot(
                routing.ids_TK.view(len(part), -1), routing.logits_TE.shape[1]
            ).sum(1)
            for routing in routings
        ]
        counts.append(torch.stack(layers, dim=1))
    return torch.cat(counts).numpy()


def mutual_information(counts_GE: Counts | NDArray[np.float64]) -> float:
    """Return the bits that an expert tells about the domain, every domain weighing the same.

    counts_GE: slots per domain (rows) and expert. [[8, 0], [0, 8]] gives 1.0, [[4, 4], [4, 4]] 0.0.
    """
    joint = counts_GE / counts_GE.sum(axis=1, keepdims=True) / len(counts_GE)
    independent = joint.sum(axis=1, keepdims=True) * joint.sum(axis=0, keepdims=True)
    seen = joint > 0
    return float((joint[seen] * np.log2(joint[seen] / independent[seen])).sum())


def information_by_layer(
    counts: Mapping[str, Counts], num_shuffles: int = 1999, seed: int = 0
) -> list[Information]:
    """Return mutual information and its permutation test for every layer.

    counts: per domain [n, L, E] from `expert_counts`, the same n everywhere. The test shuffles
    which window belongs to which domain.
    """
    stacked = np.stack([counts[domain] for domain in counts])
    num_domains, num_windows, num_layers, num_experts = stacked.shape
    flat = stacked.reshape(num_domains * num_windows, num_layers, num_experts)
    true = _by_layer(stacked.sum(axis=1))
    numbers = np.random.default_rng(seed)
    reached = np.zeros(num_layers, dtype=np.int64)
    for _ in range(num_shuffles):
        shuffled = flat[numbers.permutation(len(flat))].reshape(stacked.shape)
        reached += _by_layer(shuffled.sum(axis=1)) >= true
    return [
        Information(
            bits=float(bits),
            p_value=(1 + int(above)) / (1 + num_shuffles),
            num_shuffles=num_shuffles,
        )
        for bits, above in zip(true, reached, strict=True)
    ]


def masking_cost(
    network: Network, windows: Mapping[str, Tensor], bytes_V: Tensor
) -> Iterator[tuple[int, int, dict[str, float]]]:
    """Yield (layer, expert, bits per byte lost by domain) for every expert, masked in turn."""
    before = {domain: bits_per_byte(network, part, bytes_V) for domain, part in windows.items()}
    for layer, block in enumerate(network.layers):
        moe = block.moe
        assert isinstance(moe, MoE)
        for expert in range(network.config.num_experts):
            moe.masked_expert = expert
            try:
                after = {
                    domain: bits_per_byte(network, part, bytes_V)
                    for domain, part in windows.items()
                }
            finally:
                moe.masked_expert = None
            yield layer, expert, {domain: after[domain] - before[domain] for domain in windows}


def _by_layer(counts_GLE: Counts) -> NDArray[np.float64]:
    return np.array(
        [mutual_information(counts_GLE[:, layer]) for layer in range(counts_GLE.shape[1])]
    )
