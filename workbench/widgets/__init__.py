"""Two widgets, each one ES module that runs unchanged in JupyterLab and in a Panel page.

The *live map* draws rows x columns on one fixed scale, as fast as the browser can follow. The
*token stepper* walks through a recorded request: token by token, layer by layer, stage by stage.
What they show is made by plain functions (`encode_frame`, `stepper_state`) that need neither host;
anywidget and panel are imported by the call that makes a widget.
"""

from __future__ import annotations

from workbench.widgets.frames import (
    LOAD_TOP,
    Frame,
    MapFeed,
    MapSpec,
    decode_frame,
    encode_frame,
    fair_shares,
    load_spec,
)
from workbench.widgets.live_map import map_pane, map_widget
from workbench.widgets.show import show_load, show_steps, show_tokens, token_spec, token_weights
from workbench.widgets.steps import STAGES, State, request_ids, state_json, stepper_state
from workbench.widgets.token_stepper import stepper_pane, stepper_widget

__all__ = [
    "LOAD_TOP",
    "STAGES",
    "Frame",
    "MapFeed",
    "MapSpec",
    "State",
    "decode_frame",
    "encode_frame",
    "fair_shares",
    "load_spec",
    "map_pane",
    "map_widget",
    "request_ids",
    "show_load",
    "show_steps",
    "show_tokens",
    "state_json",
    "stepper_pane",
    "stepper_state",
    "stepper_widget",
    "token_spec",
    "token_weights",
]
