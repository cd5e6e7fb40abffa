"""What a router does with a row of logits, described by values instead of by one function a family.

    x = logits + logit_bias                      the real bias of a linear layer
    score = softmax(x) | sigmoid(x) | …          of every expert
    order = score + selection_bias               decides who, never how much
    ids = the top_k best, inside the best groups if the choice is limited to groups
    weights = score[ids] / (sum + eps) * scale   the division only when renormalising

Selecting first and scoring the chosen afterwards is the same function: sigmoid looks at one logit,
and a softmax over the chosen is a softmax over all, renormalised. So there is no option for it.
`engine.kernels.topk.route` and its twins carry it out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Self

from engine.config import at_least, one_of
from engine.errors import ConfigError

SCORES = ("softmax", "sigmoid", "sqrt_softplus", "sparsemixer")
GROUP_SCORES = ("max", "top2_sum")
_LARGEST = (2 - 2**-23) * 2.0**127
"""Of fp32, in which the numbers are used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLimit:
    """Choose only inside the best groups of neighbouring experts; ties go to the lower group."""

    num_groups: int
    """Groups of E / num_groups consecutive experts."""
    keep: int
    """Groups an expert may come from."""
    score: str
    """What a group is worth: its best expert's order (`max`) or its two best (`top2_sum`)."""
    masked: float
    """The order given to experts of the other groups: 0 or -inf."""

    def __post_init__(self) -> None:
        at_least("num_groups", self.num_groups, 1)
        at_least("keep", self.keep, 1)
        one_of("score", self.score, GROUP_SCORES)
        if self.keep > self.num_groups:
            raise ConfigError(f"keep ({self.keep}) must be at most num_groups ({self.num_groups}).")
        if self.masked not in (0.0, -math.inf):
            raise ConfigError(f"masked ({self.masked!r}) must be 0 or -inf.")


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """One kind of router. The class methods name those in use."""

    top_k: int
    """K, experts per token."""
    score: str = "softmax"
    """`softmax`, `sigmoid`, `sqrt_softplus`, or `sparsemixer`: Phi-MoE's two steps, where each of
    two experts weighs its share of a softmax over the logits close to it and not yet chosen."""
    renormalise: bool = False
    """Whether the K weights are divided by their sum."""
    eps: float = 0.0
    """Added to that sum."""
    scale: float = 1.0
    """Factor on the weights, applied once, last."""
    logit_bias: bool = False
    """Whether the logits get a bias before scoring."""
    selection_bias: bool = False
    """Whether a bias is added to the scores for the choice alone."""
    groups: GroupLimit | None = None
    jitter: float = 0.01
    """How close a logit must be to the chosen one to share in sparsemixer's softmax, relative to
    the larger of the two; half the limit, as published."""
    is_plain: bool = field(init=False, repr=False, compare=False)
    """Whether it is a softmax over the chosen logits and nothing besides (Mixtral, Qwen3); read for
    every choice, so it is worked out once."""

    def __post_init__(self) -> None:
        at_least("top_k", self.top_k, 1)
        one_of("score", self.score, SCORES)
        for name, low in (("eps", 0.0), ("scale", -math.inf), ("jitter", 0.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{name} ({value!r}) must be a number.")
            if not low <= value < math.inf or value == -math.inf:
                least = " and at least 0" if low == 0 else ""
                raise ConfigError(f"{name} ({value}) must be finite{least}.")
            if abs(value) > _LARGEST:
                raise ConfigError(f"{name} ({value}) must be at most {_LARGEST:.4g}, as in fp32.")
        for name in ("renormalise", "logit_bias", "selection_bias"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ConfigError(f"{name} ({value!r}) must be True or False.")
        if not isinstance(self.groups, GroupLimit | None):
            raise ConfigError(f"groups ({self.groups!r}) must be a GroupLimit or None.")
        if self.score == "sparsemixer" and self.top_k != 2:
            raise ConfigError(f"top_k ({self.top_k}) must be 2 for sparsemixer.")
        if self.score == "sparsemixer" and (
            self.renormalise or self.selection_bias or self.groups is not None
        ):
            raise ConfigError(
                "sparsemixer takes neither renormalise nor selection_bias nor groups; leave them."
            )
        plain = self.score == "softmax" and self.renormalise and self.weighs_logits
        plain = plain and self.scale == 1.0 and not self.logit_bias
        object.__setattr__(self, "is_plain", plain)

    @property
    def orders_logits(self) -> bool:
        """Whether the order of the scores is that of the logits.

        Then logits are compared: rounding a score cannot move the choice, and every path agrees.
        """
        return not self.selection_bias and self.groups is None

    @property
    def weighs_logits(self) -> bool:
        """Whether the weights follow from the chosen experts' logits alone.

        A renormalised softmax does: what it is divided by cancels out.
        """
        if not self.orders_logits or self.score == "sparsemixer":
            return False
        return self.score != "softmax" or (self.renormalise and self.eps == 0.0)

    def check(self, num_experts: int) -> None:
        """Raise `ConfigError` unless top_k and the groups fit `num_experts`."""
        if self.top_k > num_experts:
            raise ConfigError(
                f"top_k ({self.top_k}) must be at most the number of experts ({num_experts})."
            )
        if (limit := self.groups) is None:
            return
        size, rest = divmod(num_experts, limit.num_groups)
        if rest:
            raise ConfigError(
                f"the number of experts ({num_experts}) must be a multiple of num_groups "
                f"({limit.num_groups})."
            )
        if limit.score == "top2_sum" and size < 2:
            raise ConfigError(f"groups of {size} expert have no two best; take fewer groups.")
        if self.top_k > limit.keep * size:
            raise ConfigError(
                f"top_k ({self.top_k}) must be at most the {limit.keep * size} experts of the "
                f"{limit.keep} groups kept."
            )

    @classmethod
    def softmax(cls, top_k: int, *, renormalise: bool, scale: float = 1.0) -> Self:
        """Mixtral, Qwen3-MoE, DBRX and Granite renormalise; OLMoE, Switch and Qwen2-MoE do not.

        Source: arXiv 2401.04088, section 2.1; arXiv 2101.03961.
        """
        return cls(top_k=top_k, renormalise=renormalise, scale=scale)

    @classmethod
    def gpt_oss(cls, top_k: int) -> Self:
        """GPT-OSS: a linear layer with bias, top-k, then a softmax over the chosen."""
        return cls(top_k=top_k, renormalise=True, logit_bias=True)

    @classmethod
    def llama4(cls, top_k: int) -> Self:
        """Llama 4: top-k, then the sigmoid of each; the model weighs an expert's input with it."""
        return cls(top_k=top_k, score="sigmoid")

    @classmethod
    def deepseek_v2(
        cls, top_k: int, *, num_groups: int = 1, keep: int = 1, scale: float = 1.0
    ) -> Self:
        """DeepSeek-V2: a group is worth its best softmax; never renormalised.

        Source: arXiv 2405.04434, section 2.2.
        """
        limit = GroupLimit(num_groups=num_groups, keep=keep, score="max", masked=0.0)
        return cls(top_k=top_k, scale=scale, groups=limit if num_groups > 1 else None)

    @classmethod
    def deepseek_v3(
        cls,
        top_k: int,
        *,
        num_groups: int = 1,
        keep: int = 1,
        renormalise: bool = True,
        scale: float = 1.0,
    ) -> Self:
        """DeepSeek-V3, GLM-4.5, Kimi-K2: sigmoid, a bias that only selects, groups by two best.

        Source: arXiv 2412.19437, section 2.1.2.
        """
        limit = GroupLimit(num_groups=num_groups, keep=keep, score="top2_sum", masked=-math.inf)
        return cls(
            top_k=top_k,
            score="sigmoid",
            renormalise=renormalise,
            eps=1e-20,
            scale=scale,
            selection_bias=True,
            groups=limit if num_groups > 1 else None,
        )

    @classmethod
    def deepseek_v4(cls, top_k: int, *, scale: float = 1.0) -> Self:
        """DeepSeek-V4: the root of softplus, with a bias that only selects."""
        return cls(
            top_k=top_k,
            score="sqrt_softplus",
            renormalise=True,
            eps=1e-20,
            scale=scale,
            selection_bias=True,
        )

    @classmethod
    def phimoe(cls, *, jitter: float = 0.01) -> Self:
        """Phi-3.5-MoE: sparsemixer as it infers. Source: arXiv 2409.12136."""
        return cls(top_k=2, score="sparsemixer", jitter=jitter)
