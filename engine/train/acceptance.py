"""How many of the draft's proposals the target accepts, by one definition.

Greedy decoding: the target writes text; at each target step the draft has proposed n tokens, and
the leading ones that equal the target's own next tokens are accepted. Then

    acceptance = accepted / proposed        tokens per target step = accepted / steps + 1

Accepted tokens are the target's own, so everything can be counted on the text that the target
writes alone: one pass of the draft over it gives all its proposals.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.train.network import Network


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance:
    """Counts over all texts of one domain."""

    num_proposed: int
    """n: tokens that the draft proposes per target step."""
    steps: int
    accepted: int

    @property
    def rate(self) -> float:
        """Return accepted / proposed."""
        return self.accepted / (self.steps * self.num_proposed)

    @property
    def tokens_per_step(self) -> float:
        """Return the tokens that one target step gives: the accepted ones and its own."""
        return self.accepted / self.steps + 1

    def __add__(self, other: Acceptance) -> Acceptance:
        assert self.num_proposed == other.num_proposed, "two definitions of acceptance"
        return Acceptance(
            num_proposed=self.num_proposed,
            steps=self.steps + other.steps,
            accepted=self.accepted + other.accepted,
        )


@torch.no_grad()
def greedy_text(
    network: Network, prompts_BT: Tensor, num_tokens: int, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Continue every prompt [B, T] greedily to [B, T + num_tokens]; no cache."""
    ids = prompts_BT
    for _ in range(num_tokens):
        logits, _ = network(ids, dtype)
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return ids


@torch.no_grad()
def agreement(
    draft: Network, text_BT: Tensor, num_prompt: int, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Return where the draft would have written the same token: [B, T - num_prompt] bool."""
    logits, _ = draft(text_BT[:, :-1], dtype)
    agrees: Tensor = logits.argmax(-1) == text_BT[:, 1:]
    return agrees[:, num_prompt - 1 :]


def count_accepted(agrees_BN: Tensor, num_proposed: int) -> Acceptance:
    """Walk every text step by step and count.

    With n = 2 and agreement 1 1 0 1 0 0: two are accepted (and the third is the target's own), then
    one (and the fifth); the rest is too short for another step. 2 steps, 3 accepted of 4.
    """
    steps = accepted = 0
    for row in agrees_BN.tolist():
        at = 0
        while at + num_proposed < len(row):
            run = 0
            while run < num_proposed and row[at + run]:
                run += 1
            steps += 1
            accepted += run
            at += run + 1
    return Acceptance(num_proposed=num_proposed, steps=steps, accepted=accepted)
