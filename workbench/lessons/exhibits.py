"""What a cell shows: figures and widgets that follow the notebook's colours, light or dark.

An exhibit waits for no browser, keeps no thread and asks nothing of the network, so a notebook runs
the same without anybody looking; every exhibit also has a line of plain text. Outside a kernel
there is no widget at all, only that line.
"""

from __future__ import annotations

import html
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from engine.errors import RequestError
from workbench import widgets
from workbench.lessons.note import Note
from workbench.lessons.small import Labelled, Run, SmallEngine
from workbench.theme import domain_name, domain_order
from workbench.trace import Trace
from workbench.trace.trace import count_ids

if TYPE_CHECKING:
    import plotly.graph_objects as go

DRAW_EVERY_S = 0.1
"""A live map is drawn ten times a second at most."""

RECENT_ROWS = 256
"""What a live map shows: the last rows, some tenths of a second of them."""

PLOTLY = "application/vnd.plotly.v1+json"

# JupyterLab says its theme on the body; a page that says nothing is taken for light. The hidden
# twin keeps its width, so that it is drawn to size when the theme changes.
_STYLE = """<style>
body[data-jp-theme-light="false"] .jp-OutputArea-child:has(.trw-for-light) + .jp-OutputArea-child,
body:not([data-jp-theme-light="false"])
  .jp-OutputArea-child:has(.trw-for-dark) + .jp-OutputArea-child
  { height: 0; min-height: 0; overflow: hidden; visibility: hidden; }
.jp-OutputArea-child:has(.trw-for-light), .jp-OutputArea-child:has(.trw-for-dark)
  { height: 0; min-height: 0; overflow: hidden; }
</style>"""


def headless() -> bool:
    """Say whether nobody can look: no Jupyter kernel runs this."""
    return "ipykernel.zmqshell" not in sys.modules


class ThemedFigure:
    """A plotly figure in two colourings, of which the notebook shows the one that fits."""

    def __init__(self, draw: Callable[..., go.Figure], frame: pd.DataFrame, **options: Any) -> None:
        self.light: go.Figure = draw(frame, theme="light", **options)
        self.dark: go.Figure = draw(frame, theme="dark", **options)

    def __repr__(self) -> str:
        title = self.light.layout.title
        return _plain(f"{title.text}: {title.subtitle.text}")

    def _ipython_display_(self) -> None:
        from IPython.display import display

        for theme, shown in (("light", self.light), ("dark", self.dark)):
            mark = f'<div class="trw-for-{theme}">{_STYLE}</div>'
            display({"text/html": mark, "text/plain": ""}, raw=True)  # type: ignore[no-untyped-call]
            bundle = {PLOTLY: json.loads(shown.to_json()), "text/plain": repr(self)}
            display(bundle, raw=True)  # type: ignore[no-untyped-call]


def figure(draw: Callable[..., go.Figure], frame: pd.DataFrame, **options: Any) -> ThemedFigure:
    """Show one of `workbench.figures` in the notebook's colours: `figure(figures.jump_rate, t)`.

    Args:
        draw: a figure function.
        frame: the table of the view of the same name.
        options: what else the figure function takes, its theme excepted.
    """
    return ThemedFigure(draw, frame, **options)


def stepper(run: Run, request: int = 0, *, token: int | None = None, layer: int = 0) -> Any:
    """Show one request of a run in the token stepper.

    Args:
        run: what `SmallEngine.run` returned.
        request: its place among the run's prompts.
        token: position to begin with; None takes the first that was recorded in full.
        layer: MoE layer to begin with.

    Raises:
        RequestError: the run has no such request.
    """
    if not 0 <= request < len(run.completions):
        raise RequestError(
            f"request ({request}) must lie between 0 and {len(run.completions) - 1}, the prompts "
            "of this run."
        )
    completion = run.completions[request]
    if headless():
        return Note(f"Token stepper: {len(completion.prompt_token_ids)} tokens of the prompt.")
    focus: dict[str, Any] = {"layer": layer}
    if token is not None:
        focus["token"] = token
    return widgets.show_steps(run.trace, completion.request_id, tokenizer=run.tokenizer, **focus)


def load_map(run: Run) -> Any:
    """Show how busy each expert of each layer was over a run."""
    shares_LE = widgets.fair_shares(run.trace.expert_counts())
    if headless():
        layer, expert = np.unravel_index(int(shares_LE.argmax()), shares_LE.shape)
        top = float(shares_LE.max())
        return Note(f"Map of load: expert {expert} of layer {layer} has {top:.1f} × its share.")
    return widgets.show_load(run.trace)


def domain_map(frame: pd.DataFrame, layer: int) -> Any:
    """Show one layer of `views.domain_load`: domains by experts, coloured by load.

    Raises:
        RequestError: the table has no such layer.
    """
    own = frame[frame["layer"] == layer]
    if own.empty:
        there = ", ".join(map(str, sorted(set(frame["layer"])))) or "none"
        raise RequestError(f"layer ({layer}) must be one of the table's: {there}.")
    grid = own.pivot(index="domain", columns="expert", values="load")
    grid = grid.loc[domain_order(own["domain"])]
    if headless():
        top = own.nlargest(1, "load").to_dict("records")[0]
        return Note(
            f"Map of domains: {domain_name(top['domain'])} uses expert {top['expert']} most."
        )
    spec = widgets.MapSpec(
        title=f"Who goes where in layer {layer}",
        rows=tuple(domain_name(domain) for domain in grid.index),
        row_name="domain",
        unit="× fair share",
        short_unit="×",
        marks=((0.0, "idle"), (1.0, "fair share"), (2.0, "2×"), (widgets.LOAD_TOP, "4× or more")),
        idle="No domain has rows here",
    )
    shown = widgets.map_widget(spec)
    shown.draw(grid.to_numpy())
    return shown


def live_map(small: SmallEngine, prompts: Sequence[Labelled], *, max_tokens: int = 48) -> Run:
    """Run prompts while a map of the load over the last steps moves; return the run.

    The map stands still when the run is over. Nobody needs to look: the engine waits for no frame.
    """
    shown = None
    if not headless():
        from IPython.display import display

        shown = widgets.map_widget(widgets.load_spec(small.trace.start.moe_layers))
        display(shown)  # type: ignore[no-untyped-call]
    drawn_at = 0.0

    def draw() -> None:
        nonlocal drawn_at
        if shown is not None and time.monotonic() - drawn_at >= DRAW_EVERY_S:
            drawn_at = time.monotonic()
            shown.draw(widgets.fair_shares(recent_counts(small.trace)))

    run = small.run(prompts, max_tokens=max_tokens, watch=False, each_step=draw)
    if shown is not None:
        shown.draw(widgets.fair_shares(run.trace.expert_counts()))
    return run


def recent_counts(trace: Trace, rows: int = RECENT_ROWS) -> npt.NDArray[np.int64]:
    """Return (L, E) how many of the last rows' slots chose each expert."""
    return count_ids(trace.columns["rows/topk_ids"][-rows:], trace.start.num_experts)


def _plain(text: str) -> str:
    return html.unescape(text.replace("<br>", " "))
