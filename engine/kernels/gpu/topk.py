# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Choose each token's experts in one kernel: score, select, normalise; no wait for the device.

The choice is that of `engine.kernels.topk.route`, ties included: every expert becomes one whole
number that holds its class, its order and its id, and the largest is taken J times. One program
handles a few rows, laid out as groups x experts of a group, both padded to powers of two. Called by
`engine.routing.gate` through the registry.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import KernelError
from engine.kernels import checks
from engine.kernels.gpu import lang
from engine.kernels.gpu.variant import Variant
from engine.kernels.router import RouterConfig
from engine.kernels.topk import Selection, check_logits

MAX_EXPERTS = 1024
"""One warp holds a row in registers."""

_LARGEST = tl.constexpr(3.4028234663852886e38)
_SMALLEST = tl.constexpr(1.1754943508222875e-38)
_CLASS = tl.constexpr(1 << 48)
_TAKEN = tl.constexpr(-(1 << 62))


def route(
    logits_TE: Tensor,
    router: RouterConfig,
    *,
    logit_bias_E: Tensor | None = None,
    selection_bias_E: Tensor | None = None,
    preferred_E: Tensor | None = None,
    banned_E: Tensor | None = None,
    explain: bool = True,
    ids_dtype: torch.dtype = torch.int64,
    bad_rows: Tensor | None = None,
) -> Selection:
    """Score every expert, keep the K best of each row, and weigh them.

    Arguments and result are those of `engine.kernels.topk.route`, with up to 1024 experts. Rows of
    logits may be any stride apart, columns must be neighbours; biases and masks may have any
    stride. Ids come back in `ids_dtype`, int64 or int32. The result's `bad_rows` is the given one,
    () int32 on the device, if any.

    Raises:
        ConfigError: K or the groups do not fit E.
        KernelError: an argument does not fit the others.
    """
    check_logits(logits_TE, router, logit_bias_E, selection_bias_E, preferred_E, banned_E)
    checks.contiguous_rows("logits_TE", logits_TE)
    num_tokens, num_experts = logits_TE.shape
    if num_experts > MAX_EXPERTS:
        raise KernelError(
            f"logits_TE is {checks.describe(logits_TE)} but may have at most {MAX_EXPERTS} "
            "experts on this path."
        )
    if ids_dtype not in (torch.int64, torch.int32):
        raise KernelError(f"ids_dtype ({ids_dtype}) must be torch.int64 or torch.int32.")
    k = router.top_k
    num_ranked = min(k + 1, num_experts) if explain else k
    topk_ids_TK = logits_TE.new_empty(num_tokens, k, dtype=ids_dtype)
    weights_TK = logits_TE.new_empty(num_tokens, k, dtype=torch.float32)
    bad_rows = _zero_counter(bad_rows, logits_TE)
    ranked_ids_TJ = ranked_scores_TJ = scores_TE = shut_TE = None
    if explain:
        ranked_ids_TJ = logits_TE.new_empty(num_tokens, num_ranked, dtype=ids_dtype)
        ranked_scores_TJ = logits_TE.new_empty(num_tokens, num_ranked, dtype=torch.float32)
        scores_TE = logits_TE.new_empty(num_tokens, num_experts, dtype=torch.float32)
        if router.groups is not None:
            shut_TE = logits_TE.new_empty(num_tokens, num_experts, dtype=torch.bool)
    if num_tokens:
        constants = _constants(router, num_experts, num_ranked)
        _route[(triton.cdiv(num_tokens, constants["ROWS"]),)](
            logits_TE, _dense(logit_bias_E), _dense(selection_bias_E), _bytes(preferred_E),
            _bytes(banned_E), topk_ids_TK, weights_TK, ranked_ids_TJ, ranked_scores_TJ, scores_TE,
            _bytes(shut_TE), bad_rows, num_tokens, logits_TE.stride(0), router.eps, router.scale,
            2 * router.jitter, **constants, num_warps=1,
        )  # fmt: skip
    return Selection(
        topk_ids_TK, weights_TK, ranked_ids_TJ, ranked_scores_TJ, scores_TE, bad_rows, shut_TE
    )


def _bytes(mask_E: Tensor | None) -> Tensor | None:
    return None if mask_E is None else mask_E.contiguous().view(torch.int8)


def _dense(bias_E: Tensor | None) -> Tensor | None:
    """Return what the kernel may read without a stride."""
    return None if bias_E is None else bias_E.contiguous()


def _zero_counter(counter: Tensor | None, logits_TE: Tensor) -> Tensor:
    if counter is None:
        return logits_TE.new_zeros((), dtype=torch.int32)
    checks.memory("bad_rows", counter, (), torch.int32, "a count")
    checks.same_device(logits_TE=logits_TE, bad_rows=counter)
    return counter.zero_()


def _constants(router: RouterConfig, num_experts: int, num_ranked: int) -> dict[str, Any]:
    """Return what the kernel is compiled for."""
    limit = router.groups
    groups = limit.num_groups if limit else 1
    size = num_experts // groups
    block_g, block_s = (int(triton.next_power_of_2(count)) for count in (groups, size))
    return {
        "SCORE": router.score,
        "ORDERS_LOGITS": router.orders_logits,
        "WEIGHS_LOGITS": router.weighs_logits,
        "RENORMALISE": router.renormalise,
        "GROUPS": groups,
        "GROUP_SIZE": size,
        "KEEP": limit.keep if limit else 0,
        "BY_TWO": limit is not None and limit.score == "top2_sum",
        "MASKED": limit.masked if limit else 0.0,
        "K": router.top_k,
        "J": num_ranked,
        "ROWS": _block_rows(block_g * block_s),
        "BLOCK_G": block_g,
        "BLOCK_S": block_s,
        "BLOCK_J": int(triton.next_power_of_2(num_ranked)),
    }


def _block_rows(width: int) -> int:
    """Return how many rows one warp takes: enough to give each of its 32 lanes an expert."""
    if lang.INTERPRETED.value:  # its cost is the number of operations, not their size
        return 16
    return max(1, 32 // width)


@triton.jit
def _route(
    logits_ptr, logit_bias_ptr, selection_bias_ptr, preferred_ptr, banned_ptr,
    topk_ids_ptr, weights_ptr, ranked_ids_ptr, ranked_scores_ptr, scores_ptr, shut_ptr,
    bad_rows_ptr, num_tokens, stride_t, eps, scale, reach,
    SCORE: tl.constexpr, ORDERS_LOGITS: tl.constexpr, WEIGHS_LOGITS: tl.constexpr,
    RENORMALISE: tl.constexpr, GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, KEEP: tl.constexpr,
    BY_TWO: tl.constexpr, MASKED: tl.constexpr, K: tl.constexpr, J: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Route ROWS rows, held as (rows, groups, members of a group)."""
    NUM_EXPERTS: tl.constexpr = GROUPS * GROUP_SIZE
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < num_tokens
    group = tl.arange(0, BLOCK_G)[None, :, None]
    member = tl.arange(0, BLOCK_S)[None, None, :]
    expert = group * GROUP_SIZE + member
    inside = (group < GROUPS) & (member < GROUP_SIZE)
    whole_row = row[:, None, None] * stride_t
    there = inside & live[:, None, None]

    # 1. Widen, add the bias, clean.
    raw = _load_logits(logits_ptr + whole_row, logit_bias_ptr, expert, there)
    broken = tl.sum(_max(tl.where(tl.abs(raw) <= _LARGEST, 0, 1)), 0)
    tl.atomic_add(bad_rows_ptr, broken, mask=broken > 0)
    x = tl.where(inside, _finite(raw), float("-inf"))
    if banned_ptr is not None:
        banned = tl.load(banned_ptr + expert, mask=inside, other=0) != 0
        x = tl.where(banned, float("-inf"), x)
    if preferred_ptr is not None:
        preferred = tl.load(preferred_ptr + expert, mask=inside, other=0) != 0

    # 2. Score; peak and total are those of the softmax.
    peak = _max(x)
    total = tl.full((ROWS,), 1.0, tl.float32)
    if SCORE == "softmax" or SCORE == "sparsemixer":
        total = _sum(tl.exp(x - peak[:, None, None]))
    if not ORDERS_LOGITS or scores_ptr is not None:
        scores = _score(x, peak[:, None, None], total[:, None, None], SCORE)
    if scores_ptr is not None:
        at = row[:, None, None] * NUM_EXPERTS + expert
        tl.store(scores_ptr + at, scores, mask=there)

    # 3. Order: one number an expert, the larger the better.
    if ORDERS_LOGITS:
        order = x
    else:
        order = scores
        if selection_bias_ptr is not None:
            order += tl.load(selection_bias_ptr + expert, mask=inside, other=0.0)
        if banned_ptr is not None:
            order = tl.where(banned, float("-inf"), order)
        if KEEP > 0:
            order = tl.where(inside, order, float("-inf"))
            kept = _best_groups(order, group, member, GROUPS, KEEP, BY_TWO)
            if preferred_ptr is not None:
                kept = kept | preferred
            order = tl.where(kept, order, MASKED)
            if shut_ptr is not None:
                at = row[:, None, None] * NUM_EXPERTS + expert
                shut = tl.where(kept & inside, 0, 1).to(tl.int8)
                tl.store(shut_ptr + at, shut, mask=there)
    keys = _key(order, expert)
    if preferred_ptr is not None:
        keys += preferred.to(tl.int64) * _CLASS
    if banned_ptr is not None:
        keys -= banned.to(tl.int64) * _CLASS
    keys = tl.where(inside, keys, _TAKEN)

    # 4. Take the largest key J times; a key names its expert.
    slot = tl.arange(0, BLOCK_J)[None, :]
    best = tl.zeros((ROWS, BLOCK_J), tl.int64)
    for rank in range(J):
        largest = _max(keys)
        best = tl.where(slot == rank, largest[:, None], best)
        keys = tl.where(keys == largest[:, None, None], _TAKEN, keys)
    ids = tl.where(slot < J, 65535 - (best & 65535), 0).to(tl.int32)

    # 5. Weigh the chosen, from their logits again.
    there = live[:, None] & (slot < J)
    mine = _load_logits(logits_ptr + row[:, None] * stride_t, logit_bias_ptr, ids, there)
    mine = _finite(mine)
    if banned_ptr is not None:
        out = tl.load(banned_ptr + ids, mask=there, other=0) != 0
        mine = tl.where(out, float("-inf"), mine)
    chosen = slot < K
    if SCORE == "sparsemixer":
        first = expert == tl.sum(tl.where(slot == 0, ids, 0), 1)[:, None, None]
        second = expert == tl.sum(tl.where(slot == 1, ids, 0), 1)[:, None, None]
        of_all = _share(x, x, first, reach)
        of_rest = _share(tl.where(first, float("-inf"), x), x, second, reach)
        weights = tl.where(slot == 0, of_all[:, None], of_rest[:, None])
    elif SCORE == "softmax" and WEIGHS_LOGITS:
        exps = tl.exp(mine - tl.max(tl.where(chosen, mine, float("-inf")), 1)[:, None])
        weights = exps / tl.sum(tl.where(chosen, exps, 0.0), 1)[:, None]
    else:
        weights = _score(mine, peak[:, None], total[:, None], SCORE)
        if RENORMALISE:
            whole = tl.sum(tl.where(chosen, weights, 0.0), 1) + eps
            weights = weights / tl.maximum(whole, _SMALLEST)[:, None]
    at = row[:, None] * K + slot
    stored = live[:, None] & chosen
    tl.store(topk_ids_ptr + at, ids.to(topk_ids_ptr.dtype.element_ty), mask=stored)
    tl.store(weights_ptr + at, weights * scale, mask=stored)

    # 6. What explains the choice: the runner-up too, and what was compared.
    if ranked_ids_ptr is not None:
        at = row[:, None] * J + slot
        compared = _order_of(best)
        if ORDERS_LOGITS:
            compared = _score(mine, peak[:, None], total[:, None], SCORE)
        tl.store(ranked_ids_ptr + at, ids.to(ranked_ids_ptr.dtype.element_ty), mask=there)
        tl.store(ranked_scores_ptr + at, compared, mask=there)


@triton.jit
def _max(x):
    """Return each row's largest value: (rows, groups, members) gives (rows,)."""
    return tl.max(tl.max(x, 2), 1)


@triton.jit
def _sum(x):
    return tl.sum(tl.sum(x, 2), 1)


@triton.jit
def _load_logits(row_ptr, bias_ptr, expert, there):
    x = tl.load(row_ptr + expert, mask=there, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + expert, mask=there, other=0.0)
    return x


@triton.jit
def _finite(x):
    """Read NaN as the lowest finite number and infinities as the largest of their sign."""
    x = tl.where(x == x, x, -_LARGEST)
    return tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST)


@triton.jit
def _score(x, peak, total, SCORE: tl.constexpr):
    if SCORE == "sigmoid":
        small = tl.exp(-tl.abs(x))
        score = tl.where(x >= 0, 1.0, small) / (1.0 + small)
    elif SCORE == "sqrt_softplus":
        # log(1 + small) with the rounding of 1 + small undone, so that it holds near 0.
        small = tl.exp(-tl.abs(x))
        one_more = 1.0 + small
        rounded = tl.where(one_more == 1.0, 1.0, one_more - 1.0)
        log = tl.where(one_more == 1.0, small, tl.log(one_more) * (small / rounded))
        score = tl.sqrt(tl.maximum(x, 0.0) + log)
    else:
        score = tl.exp(x - peak) / total
    return score


@triton.jit
def _best_groups(
    order, group, member, GROUPS: tl.constexpr, KEEP: tl.constexpr, BY_TWO: tl.constexpr
):
    """Return (rows, groups, 1): whether a group is among the KEEP worth most; ties go low."""
    worth = tl.max(order, 2)[:, :, None]
    if BY_TWO:
        keys = _key(order, member)
        others = tl.where(keys == tl.max(keys, 2)[:, :, None], float("-inf"), order)
        worth += tl.max(others, 2)[:, :, None]
    keys = tl.where(group < GROUPS, _key(worth, group), _TAKEN)
    kept = keys == _TAKEN - 1
    for _ in range(KEEP):
        largest = _max(keys)[:, None, None]
        kept = kept | (keys == largest)
        keys = tl.where(keys == largest, _TAKEN, keys)
    return kept


@triton.jit
def _key(order, index):
    """Pack an order and an index: a larger key is a higher order, then a lower index."""
    bits = tl.where(order == 0.0, 0.0, order).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.int64) * 65536 + (65535 - index).to(tl.int64)


@triton.jit
def _order_of(key):
    """Return the order packed in a key."""
    bits = (key >> 16).to(tl.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _share(candidates, x, is_chosen, reach):
    """Return the chosen expert's part of a softmax over the candidates close to it, (rows,)."""
    best = _max(tl.where(is_chosen, x, float("-inf")))[:, None, None]
    far = best - x > reach * tl.maximum(tl.abs(x), best)
    return 1.0 / _sum(tl.where(far, 0.0, tl.exp(candidates - best)))


def variants() -> tuple[Variant, ...]:
    """Return what is compiled for a device: each kind of router at the sizes of its family."""
    softmax = RouterConfig.softmax(8, renormalise=True)
    families = {
        "mixtral": (RouterConfig.softmax(2, renormalise=True), 8),
        "qwen3": (softmax, 128),
        "olmoe": (RouterConfig.softmax(8, renormalise=False), 64),
        "gpt_oss": (RouterConfig.gpt_oss(4), 128),
        "llama4": (RouterConfig.llama4(1), 16),
        "deepseek_v2": (RouterConfig.deepseek_v2(6, num_groups=8, keep=3, scale=16.0), 160),
        "deepseek_v3": (RouterConfig.deepseek_v3(8, num_groups=8, keep=4, scale=2.5), 256),
        "deepseek_v4": (RouterConfig.deepseek_v4(6, scale=1.5), 256),
        "phimoe": (RouterConfig.phimoe(), 16),
        "odd": (softmax, 60),
        "large": (RouterConfig.softmax(16, renormalise=True), 512),
    }
    return (
        *(_variant(name, router, count) for name, (router, count) in families.items()),
        *(_variant("qwen3", softmax, 128, dtype=dtype) for dtype in ("bf16", "fp16")),
        _variant("qwen3", softmax, 128, explain=False),
        _variant("deepseek_v3", *families["deepseek_v3"], policy=True),
    )


def _variant(
    name: str,
    router: RouterConfig,
    num_experts: int,
    *,
    dtype: str = "fp32",
    explain: bool = True,
    policy: bool = False,
) -> Variant:
    pointers = {
        "logits_ptr": f"*{dtype}",
        "logit_bias_ptr": "*fp32" if router.logit_bias else "constexpr",
        "selection_bias_ptr": "*fp32" if router.selection_bias else "constexpr",
        "preferred_ptr": "*i8" if policy else "constexpr",
        "banned_ptr": "*i8" if policy else "constexpr",
        "topk_ids_ptr": "*i64",
        "weights_ptr": "*fp32",
        "ranked_ids_ptr": "*i64" if explain else "constexpr",
        "ranked_scores_ptr": "*fp32" if explain else "constexpr",
        "scores_ptr": "*fp32" if explain else "constexpr",
        "shut_ptr": "*i8" if explain and router.groups is not None else "constexpr",
        "bad_rows_ptr": "*i32",
    }
    numbers = {"num_tokens": "i32", "stride_t": "i32"}
    numbers |= {"eps": "fp32", "scale": "fp32", "reach": "fp32"}
    num_ranked = min(router.top_k + 1, num_experts) if explain else router.top_k
    constants = _constants(router, num_experts, num_ranked)
    absent = {name: None for name, kind in pointers.items() if kind == "constexpr"}
    marks = f"{'' if explain else '.bare'}{'.policy' if policy else ''}"
    return Variant(
        name=f"{name}.{dtype}.{num_experts}{marks}",
        kernel=_route,
        signature=pointers | numbers | dict.fromkeys(constants, "constexpr"),
        constexprs=absent | constants,
        aligned=("stride_t",) if num_experts % 16 == 0 else (),
        num_warps=1,
        dtype=dtype,
    )
