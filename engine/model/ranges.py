"""NVTX ranges with the names of the stages, so that Nsight Systems shows what a trace shows.

Where there is no CUDA nothing is wrapped and nothing costs anything. Where there is, each method
that is a stage of a step is replaced on its object by one that pushes a range, calls it and pops
the range; pushing without a profiler attached takes about a microsecond. Called once, when a rank
is built, and by the engine for the stages that are its own: `schedule` and `postprocess`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

from engine.model.moe import MoE
from engine.model.transformer import Transformer


class Pusher(Protocol):
    """What is needed of `torch.cuda.nvtx`."""

    def range_push(self, msg: str) -> Any:
        """Open a range."""

    def range_pop(self) -> Any:
        """Close the one opened last."""


Stage = tuple[str, Any, str]
"""Name, object and method."""


def annotate(model: Transformer, nvtx: Pusher | None = None) -> int:
    """Give every stage of `model` a range; returns how many methods were wrapped.

    Args:
        model: whole, with its dispatchers.
        nvtx: takes the ranges; None is `torch.cuda.nvtx` if there is CUDA, and otherwise nobody.
    """
    return give_ranges(_stages(model), nvtx)


def give_ranges(stages: Iterable[Stage], nvtx: Pusher | None = None) -> int:
    """Give some stages a range; returns how many methods were wrapped.

    Args:
        stages: what to wrap; a method that several of them share is wrapped once.
        nvtx: as in `annotate`.
    """
    if nvtx is None:
        if not torch.cuda.is_available():
            return 0
        nvtx = torch.cuda.nvtx
    wrapped: set[tuple[int, str]] = set()
    for stage, owner, method in stages:
        if (id(owner), method) not in wrapped:  # layers share their dispatcher
            setattr(owner, method, _ranged(getattr(owner, method), stage, nvtx))
            wrapped.add((id(owner), method))
    return len(wrapped)


def _stages(model: Transformer) -> Iterator[Stage]:
    yield "embed", model.embed, "forward"
    yield "head", model, "head"
    for layer in model.layers:
        yield "attention", layer.attention, "forward"
        if not layer.is_moe:
            yield "experts", layer.mlp, "forward"
            continue
        moe = layer.moe
        assert isinstance(moe, MoE)
        yield "gate", moe.gate, "logits"
        yield "select", moe.gate, "select"
        yield "place", moe.placer, "place"
        yield "experts", moe.experts, "forward"
        yield "sort", moe.dispatcher.order, "by_expert"
        yield "dispatch", moe.dispatcher, "dispatch"
        yield "combine", moe.dispatcher, "combine"
        for stage, method in (("wait", "exchange_counts"), ("transfer", "receive")):
            if hasattr(moe.dispatcher, method):  # inside one process there is no exchange
                yield stage, moe.dispatcher, method


def _ranged(method: Callable[..., Any], stage: str, nvtx: Pusher) -> Callable[..., Any]:
    @functools.wraps(method)
    def within(*args: Any, **kwargs: Any) -> Any:
        nvtx.range_push(stage)
        try:
            return method(*args, **kwargs)
        finally:
            nvtx.range_pop()

    return within
