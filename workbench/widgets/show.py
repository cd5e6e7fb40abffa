"""One call from a trace to a widget, for notebooks and pages.

    show_load(trace)                                    layers x experts
    show_tokens(trace, layer=2, tokenizer=tokenizer)    tokens x experts of one request
    show_steps(trace, tokenizer=tokenizer)              step through one request

Each returns an anywidget; `make=map_pane` or `make=stepper_pane` returns a Panel component.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import TraceError
from workbench.trace import Trace
from workbench.widgets.frames import MapSpec, fair_shares, load_spec
from workbench.widgets.live_map import map_widget
from workbench.widgets.steps import State, stepper_state
from workbench.widgets.token_stepper import stepper_widget
from workbench.widgets.token_text import Tokens


def show_load(trace: Trace, *, make: Callable[..., Any] = map_widget, **props: Any) -> Any:
    """Return a map of how busy each expert of each MoE layer was over the whole trace."""
    shown = make(load_spec(trace.start.moe_layers), **props)
    shown.draw(fair_shares(trace.expert_counts()), time_s=_end_s(trace))
    return shown


def show_tokens(
    trace: Trace,
    *,
    layer: int,
    request_id: int | None = None,
    tokenizer: Tokens | None = None,
    make: Callable[..., Any] = map_widget,
    **props: Any,
) -> Any:
    """Return a map of one request in one layer: its tokens by experts, coloured by weight.

    Raises:
        TraceError: the trace has no such request, or the model no such MoE layer.
    """
    state = stepper_state(trace, request_id, tokenizer=tokenizer)
    shown = make(token_spec(state, layer), **props)
    shown.draw(token_weights(state, layer), time_s=_end_s(trace))
    return shown


def show_steps(
    trace: Trace,
    request_id: int | None = None,
    *,
    tokenizer: Tokens | None = None,
    make: Callable[..., Any] = stepper_widget,
    **props: Any,
) -> Any:
    """Return a stepper through one request; None takes the first with full decisions.

    Raises:
        TraceError: the trace has no such request.
    """
    return make(stepper_state(trace, request_id, tokenizer=tokenizer), **props)


def token_spec(state: State, layer: int) -> MapSpec:
    """Return the words for `token_weights`; `layer` is the model's number of a MoE layer."""
    _place(state, layer)
    return MapSpec(
        title=f"Tokens by experts in layer {layer}",
        rows=tuple(f"{token['position']} {token['text']}" for token in state["tokens"]),
        row_name="token",
        high=1.0,
        unit="of the token’s weight",
        low_word="",
        marks=((0.0, "not chosen"), (0.5, "half"), (1.0, "all of it")),
        idle="No expert was chosen",
    )


def token_weights(state: State, layer: int) -> npt.NDArray[np.float64]:
    """Return (T, E) the weight each token gave each expert, 0 where it was not chosen."""
    place = _place(state, layer)
    weights_TE = np.zeros((len(state["tokens"]), state["engine"]["num_experts"]))
    for row, token in enumerate(state["tokens"]):
        record = token["layers"][place]
        for expert, weight in zip(record["topk_ids"], record["topk_weights"], strict=True):
            if expert >= 0:
                weights_TE[row, expert] = np.nan if weight is None else weight
    return weights_TE


def _place(state: State, layer: int) -> int:
    layers: list[int] = state["engine"]["layers"]
    if layer not in layers:
        there = ", ".join(map(str, layers)) or "none, it is dense"
        raise TraceError(f"layer ({layer}) must be a MoE layer of the traced model: {there}.")
    return layers.index(layer)


def _end_s(trace: Trace) -> float:
    times = trace.columns["steps/time_s"]
    return float(times[-1]) if len(times) else trace.start.time_s
