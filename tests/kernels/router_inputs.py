"""Routers of every kind with logits and biases to try them on, and how a choice is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.kernels import reference_router
from engine.kernels.reference_router import Routed
from engine.kernels.router import RouterConfig
from engine.kernels.topk import Selection
from tests.numerics import close

Path = Callable[..., Selection]
GROUPS = {8: 4, 60: 6, 128: 8, 256: 8, 384: 8, 512: 16}
"""Numbers of experts that are tried with groups -> groups."""

KINDS: dict[str, Callable[[int, int], RouterConfig | None]] = {
    "softmax": lambda k, e: RouterConfig.softmax(k, renormalise=False),
    "softmax, renormalised": lambda k, e: RouterConfig.softmax(k, renormalise=True, scale=2.5),
    "gpt-oss": lambda k, e: RouterConfig.gpt_oss(k),
    "llama4": lambda k, e: RouterConfig.llama4(k),
    "deepseek-v2": lambda k, e: _grouped(RouterConfig.deepseek_v2, k, e),
    "deepseek-v3": lambda k, e: _grouped(RouterConfig.deepseek_v3, k, e),
    "deepseek-v3, one group": lambda k, e: RouterConfig.deepseek_v3(k),
    "deepseek-v4": lambda k, e: RouterConfig.deepseek_v4(k, scale=1.5),
    "phimoe": lambda k, e: RouterConfig.phimoe(jitter=0.1) if k == 2 else None,
}
"""Name -> the router for K of E experts, None where there is none."""


def _grouped(family: Callable[..., RouterConfig], k: int, num_experts: int) -> RouterConfig | None:
    if num_experts not in GROUPS:
        return None
    size = num_experts // GROUPS[num_experts]
    return family(k, num_groups=GROUPS[num_experts], keep=max(2, -(-k // size)), scale=2.5)


class Case(NamedTuple):
    """A router and what it is given."""

    router: RouterConfig
    logits_TE: Tensor
    biases: dict[str, Tensor]
    oracle: Routed

    def first(self, num_tokens: int) -> Case:
        """Return the case with its first rows alone."""
        *columns, bad_rows = self.oracle
        oracle = Routed(*(column[:num_tokens] for column in columns), bad_rows)
        return self._replace(logits_TE=self.logits_TE[:num_tokens], oracle=oracle)

    def run(self, path: Path, **options: Any) -> Selection:
        """Choose by `path`."""
        return path(self.logits_TE, self.router, **self.biases, **options)


def case(router: RouterConfig, num_tokens: int, num_experts: int, *, seed: int = 0) -> Case:
    """Make random logits, and biases large enough to decide.

    In each row what will be compared lies spread out, and rows in which two groups are worth nearly
    the same are left out, so that fp32 and fp64 must choose alike.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens + 4, num_experts)
    places = torch.rand(shape, generator=generator).argsort(-1)
    spread = (places + 0.2 + 0.6 * torch.rand(shape, generator=generator)) / num_experts
    bias = 0.4 * torch.rand(num_experts, generator=generator) - 0.2
    biases = {}
    logits_TE = 8 * spread - 4
    if router.logit_bias:
        biases["logit_bias_E"] = 10 * bias
        logits_TE = logits_TE - 10 * bias
    if router.selection_bias:
        biases["selection_bias_E"] = bias
        scores = 0.25 + 0.5 * spread - bias
        logits_TE = torch.logit(scores)
        if router.score == "sqrt_softplus":
            logits_TE = torch.expm1(scores**2).log()
    oracle = reference_router.route(logits_TE, router, **biases)
    clear = (oracle.clearance_T > 1e-5).nonzero()[:num_tokens, 0]
    assert len(clear) == num_tokens, "too few rows without near ties; take another seed"
    *columns, bad_rows = oracle
    kept = Routed(*(column[clear] for column in columns), bad_rows)
    return Case(router, logits_TE[clear], biases, kept)


def cases(kind: str, num_experts: int, ks: Iterator[int], num_tokens: int) -> Iterator[Case]:
    """Yield a case for each K that this kind of router has with so many experts."""
    for k in ks:
        router = KINDS[kind](k, num_experts)
        if router is not None:
            yield case(router, num_tokens, num_experts, seed=k)


def agrees(chosen: Selection, oracle: Routed) -> bool:
    """Whether ids are the oracle's, in order, and weights equal to fp32 rounding."""
    return torch.equal(chosen.topk_ids_TK, oracle.topk_ids_TK) and close(
        chosen.topk_weights_TK, oracle.topk_weights_TK, 5e-6
    )


def explains(chosen: Selection, oracle: Routed) -> bool:
    """Whether the runner-up and its distance are the oracle's as well."""
    k, num_ranked = chosen.topk_ids_TK.shape[1], chosen.ranked_ids_TJ.shape[1]
    if not torch.equal(chosen.ranked_ids_TJ[:, :k], chosen.topk_ids_TK):
        return False
    if num_ranked == k:
        return bool((oracle.runner_up_T == -1).all())
    margin_T = chosen.ranked_scores_TJ[:, k - 1] - chosen.ranked_scores_TJ[:, k]
    expected_T = oracle.margin_T.to(margin_T.dtype)
    return torch.equal(chosen.ranked_ids_TJ[:, k], oracle.runner_up_T) and torch.allclose(
        margin_T, expected_T, rtol=1e-3, atol=1e-6
    )
