"""Time device work: medians of events around repeated calls, or of replays of a captured graph.

Inputs are rotated, so that a repeated call does not find the last one's weights in the cache.
On a CPU (dry run) it only calls everything once; that time says nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], Any]

SECONDS = 0.12
"""Measured for each number; warm-up comes on top."""
LEAST, MOST = 5, 200


def milliseconds(calls: Sequence[Call], device: torch.device) -> float:
    """Return the median time of one call, the calls taken in turn.

    Args:
        calls: the same work on different inputs, each warmed up once here.
        device: where they run.
    """
    if device.type == "cpu":
        began = time.perf_counter()
        calls[0]()
        return (time.perf_counter() - began) * 1e3
    for call in calls:
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    calls[0]()
    torch.cuda.synchronize()
    once = max(time.perf_counter() - began, 1e-6)
    rounds = max(LEAST, min(MOST, int(SECONDS / once)))
    event: Callable[..., Any] = torch.cuda.Event
    events = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(rounds)]
    for number, (start, end) in enumerate(events):
        start.record()
        calls[number % len(calls)]()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in events))


def capture(call: Call) -> torch.cuda.CUDAGraph:
    """Record a call as a CUDA graph, after it ran once on a stream of its own."""
    stream: Callable[[], Any] = torch.cuda.Stream
    side = stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def graph_milliseconds(calls: Sequence[Call], device: torch.device) -> float:
    """Return the median time of one replay, a graph for each call."""
    graphs = [capture(call) for call in calls]
    return milliseconds([graph.replay for graph in graphs], device)
