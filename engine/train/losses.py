"""The losses: next token, balance of the experts, size of the router's logits, distillation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.train.network import Routing

BALANCE_WEIGHT = 0.01
Z_WEIGHT = 0.001


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per token."""
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


def distillation_loss(logits_BTV: Tensor, teacher_BTV: Tensor) -> Tensor:
    """Return the mean cross-entropy against the teacher's distribution, in nats per token."""
    log_probs = logits_BTV.float().log_softmax(-1)
    return -(teacher_BTV.float().softmax(-1) * log_probs).sum(-1).mean()


def balance_loss(logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """Return E times the sum over experts of (share of slots) x (mean probability).

    1.0 is even use. The shares are those of the whole batch, not of one sequence: a sequence is in
    one language, and evening it out would suppress experts that know a language.
    With 2 experts, K = 1, ids [0, 0] and probabilities [.75, .25] twice: 2 x 1 x .75 = 1.5.
    Source: Switch Transformer, section 2.2, for K > 1.
    """
    num_experts = logits_TE.shape[1]
    share_E = F.one_hot(ids_TK.reshape(-1), num_experts).float().mean(0)
    return num_experts * (share_E * logits_TE.softmax(-1).mean(0)).sum()


def z_loss(logits_TE: Tensor) -> Tensor:
    """Return the mean squared log of the softmax's denominator. Source: ST-MoE, section 3.3."""
    return logits_TE.logsumexp(-1).square().mean()


def router_loss(routings: Sequence[Routing]) -> Tensor:
    """Return the weighted balance and z losses, averaged over layers; 0 for a dense model."""
    if not routings:
        return torch.zeros(())
    terms = [
        BALANCE_WEIGHT * balance_loss(routing.logits_TE, routing.ids_TK)
        + Z_WEIGHT * z_loss(routing.logits_TE)
        for routing in routings
    ]
    return torch.stack(terms).mean()
