"""Which experts did each token go to, with which weights, and how clear was the choice?"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import pandas as pd

from engine.events import CAUSES
from workbench.trace.schema import Array
from workbench.trace.trace import Trace
from workbench.views.rows import ACCEPTED, chosen_rows, row_domains, row_steps
from workbench.views.tidy import LABEL, Column, table

TOKEN_COLUMNS = {
    "request_id": Column("int64", "the engine's number of the request"),
    "domain": Column("str", 'label of the request; "" where it had none or is not known'),
    "position": Column("int64", "place of the token in its sequence, from 0"),
    "token_id": Column("int64", "id in the vocabulary"),
    "text": Column("str", "the token as text; #id without a tokenizer"),
    "layer": Column("int64", "the model's layer number"),
    "step": Column("int64", "number of the forward pass that ran the row"),
    "cause": Column("str", "why the row ran, one of engine.events.CAUSES"),
    "table_version": Column("int64", "version of the routing table the step read"),
    "topk_ids": Column("object", "tuple of K logical experts, best first; -1 is no expert"),
    "phy_ids": Column("object", "tuple of K physical experts; -1 is no expert"),
    "topk_weights": Column("object", "tuple of K weights of the experts' outputs"),
    "margin": Column("float64", "score of the last expert chosen minus the runner-up's; inf: none"),
    "label": LABEL,
}


def token_experts(
    trace: Trace,
    *,
    request_id: int | None = None,
    text: Callable[[int], str] | None = None,
    causes: Collection[str] | None = ACCEPTED,
    label: str = "recorded",
) -> pd.DataFrame:
    """Return one line per token and layer, `TOKEN_COLUMNS`, by request, position, run and layer.

    Args:
        trace: what to read; all requests of a long one make a large table.
        request_id: only this request's tokens; one the trace lacks gives no lines.
        text: token id to text, such as `engine.tokenizer.token`; None shows `#id`.
        causes: rows shown; the default leaves out rows that ran again, so that a token stands
            once; None shows all.
        label: where the numbers come from, see `workbench.views.tidy.LABELS`.

    Raises:
        ConfigError: an unknown cause or label.
    """
    columns, layers = trace.columns, trace.start.moe_layers
    kept = chosen_rows(trace, causes)
    if request_id is not None:
        kept &= columns["rows/request_ids"] == request_id
    rows = np.flatnonzero(kept)
    # lexsort is stable, so rows of one token stay in the order they ran.
    rows = rows[np.lexsort((columns["rows/positions"][rows], columns["rows/request_ids"][rows]))]

    def per_layer(values_N: Array) -> Array:
        return np.repeat(values_N[rows], len(layers))

    token_ids = columns["rows/token_ids"]
    values = {
        "request_id": per_layer(columns["rows/request_ids"]),
        "domain": per_layer(row_domains(trace)),
        "position": per_layer(columns["rows/positions"]),
        "token_id": per_layer(token_ids),
        "text": np.repeat(_texts(token_ids[rows], text), len(layers)),
        "layer": np.tile(np.array(layers, np.int64), len(rows)),
        "step": per_layer(row_steps(trace, "step")),
        "cause": per_layer(np.array(CAUSES, object)[columns["rows/causes"]]),
        "table_version": per_layer(row_steps(trace, "table_version")),
        "topk_ids": _tuples(columns["rows/topk_ids"][rows]),
        "phy_ids": _tuples(columns["rows/phy_ids"][rows]),
        "topk_weights": _tuples(columns["rows/topk_weights"][rows].astype(np.float64)),
        "margin": columns["rows/margins"][rows].ravel(),
    }
    return table(TOKEN_COLUMNS, values, label)


def _texts(token_ids_N: Array, text: Callable[[int], str] | None) -> Array:
    ids, of_row = np.unique(token_ids_N, return_inverse=True)
    names = [text(token) if text else f"#{token}" for token in ids.tolist()]
    return np.array(names, dtype=object)[of_row]


def _tuples(values_NLK: Array) -> list[tuple[float, ...]]:
    rows, layers, slots = values_NLK.shape
    return [tuple(line) for line in values_NLK.reshape(rows * layers, slots).tolist()]
