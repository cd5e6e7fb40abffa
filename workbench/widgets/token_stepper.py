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

from workbench.widgets.hosts import Hosted, Prop, notebook_class, panel_class
from workbench.widgets.steps import STAGES, State, state_json

PROPS = {
    "state": Prop("", "A stepper_state as JSON."),
    "token": Prop(0, "Place of the token in focus."),
    "layer": Prop(0, "Place of the layer in focus among the MoE layers."),
    "stage": Prop(STAGES[0], "Stage in focus.", STAGES),
    "view": Prop("picture", "How it is drawn.", ("picture", "table")),
    "theme": Prop("auto", "Colours; auto asks the page.", ("auto", "light", "dark")),
}


def stepper_widget(state: State, **traits: Any) -> Any:
    """Return a token stepper for a notebook: an anywidget with `load(state)` and `PROPS`.

    Raises:
        ImportError: anywidget is not installed; `pip install 'tokenrouter-workbench[ui]'`.
    """
    return in_notebook()(state, **traits)


def stepper_pane(state: State, **params: Any) -> Any:
    """Return a token stepper for a Panel page: a component with `load(state)` and `PROPS`.

    Raises:
        ImportError: panel is not installed; `pip install 'tokenrouter-workbench[ui]'`.
    """
    return on_page()(state, **params)


class TokenStepper(Hosted):
    """One request's text and each token's way through the layers."""

    def __init__(self, state: State, **props: Any) -> None:
        """Show a request from its first fully recorded token."""
        first = {"state": state_json(state), "token": first_full(state)}
        super().__init__(**{**first, **props})

    def load(self, state: State) -> None:
        """Show another request, from its first fully recorded token."""
        self.put(state=state_json(state), token=first_full(state), layer=0, stage=STAGES[0])


@cache
def in_notebook() -> Any:
    """Return the anywidget's class."""
    return notebook_class(TokenStepper, "token_stepper", PROPS)


@cache
def on_page() -> Any:
    """Return the Panel component's class."""
    return panel_class(TokenStepper, "token_stepper", PROPS)


def first_full(state: State) -> int:
    """Return the place of the first token with a full record in some layer, 0 if none has one."""
    for place, token in enumerate(state["tokens"]):
        if any(layer["full"] for layer in token["layers"]):
            return place
    return 0
