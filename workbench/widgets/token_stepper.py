"""The token stepper for two hosts: an anywidget for notebooks, a component for Panel pages.

    stepper = stepper_widget(stepper_state(trace, tokenizer=engine.tokenizer))    # in a notebook
    stepper = stepper_pane(state)                                                 # on a Panel page
    stepper.load(other_state)                                                     # another request

Both have the same properties; what the reader does and what a program sets are the same thing, so a
page may follow (`token`, `layer`, `stage`) and a presenter may lead.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from workbench.widgets.module import script, styles
from workbench.widgets.steps import STAGES, State, state_json


def stepper_widget(state: State, **traits: Any) -> Any:
    """Return a token stepper for a notebook: an anywidget with `load(state)`.

    `token` is the place of the token in focus among `state["tokens"]`, `layer` that of the layer
    among the MoE layers, `stage` one of `STAGES`; `view` is `picture` or `table`, `theme` is
    `auto`, `light` or `dark`.
    """
    return anywidget_class()(state, **traits)


def stepper_pane(state: State, **params: Any) -> Any:
    """Return a token stepper for a Panel page, with the properties of `stepper_widget`."""
    return panel_class()(state, **params)


@cache
def anywidget_class() -> Any:
    """Return the anywidget's class; needs anywidget.

    Raises:
        ImportError: anywidget is not installed; `pip install 'tokenrouter-workbench[ui]'`.
    """
    import anywidget
    import traitlets

    class TokenStepper(anywidget.AnyWidget):
        """One request's text and each token's way through the layers."""

        _esm = script("token_stepper")
        _css = styles("token_stepper")

        state = traitlets.Unicode("").tag(sync=True)
        token = traitlets.Int(0).tag(sync=True)
        layer = traitlets.Int(0).tag(sync=True)
        stage = traitlets.Enum(STAGES, STAGES[0]).tag(sync=True)
        view = traitlets.Enum(["picture", "table"], "picture").tag(sync=True)
        theme = traitlets.Enum(["auto", "light", "dark"], "auto").tag(sync=True)

        def __init__(self, state: State, **traits: Any) -> None:
            focus = {"token": first_full(state), **traits}
            super().__init__(state=state_json(state), **focus)

        def load(self, state: State) -> None:
            """Show another request, from its first fully recorded token."""
            with self.hold_sync():
                self.state = state_json(state)
                self.token, self.layer, self.stage = first_full(state), 0, STAGES[0]

    return TokenStepper


@cache
def panel_class() -> Any:
    """Return the Panel component's class; needs panel.

    Raises:
        ImportError: panel is not installed; `pip install 'tokenrouter-workbench[ui]'`.
    """
    import param
    from panel.custom import AnyWidgetComponent

    class TokenStepper(AnyWidgetComponent):
        """One request's text and each token's way through the layers."""

        _esm = script("token_stepper")
        _stylesheets = [styles("token_stepper")]

        state = param.String(default="", doc="A stepper_state as JSON.")
        token = param.Integer(default=0, doc="Place of the token in focus.")
        layer = param.Integer(default=0, doc="Place of the layer in focus among the MoE layers.")
        stage: Any = param.Selector(default=STAGES[0], objects=list(STAGES), doc="Stage in focus.")
        view: Any = param.Selector(default="picture", objects=["picture", "table"])
        theme: Any = param.Selector(default="auto", objects=["auto", "light", "dark"])

        def __init__(self, state: State, **params: Any) -> None:
            super().__init__(  # type: ignore[no-untyped-call]
                state=state_json(state),
                **{
                    "token": first_full(state),
                    "sizing_mode": "stretch_width",
                    "margin": 0,
                    **params,
                },
            )

        def load(self, state: State) -> None:
            """Show another request, from its first fully recorded token."""
            self.param.update(
                state=state_json(state), token=first_full(state), layer=0, stage=STAGES[0]
            )

    return TokenStepper


def first_full(state: State) -> int:
    """Return the place of the first token with a full record in some layer, 0 if none has one."""
    for place, token in enumerate(state["tokens"]):
        if any(layer["full"] for layer in token["layers"]):
            return place
    return 0
