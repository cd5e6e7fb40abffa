"""What happens to each token when one expert may not be chosen any more."""

from __future__ import annotations

import numpy as np
import pandas as pd

from engine.errors import RequestError
from workbench.lessons.small import Run


def ban_effect(before: Run, after: Run, layer: int, expert: int) -> pd.DataFrame:
    """Return one line for each token that lost `expert` in `layer`, by position.

    Columns: `position`, `token`, `before` and `after` (tuples of experts, best first), `newcomer`
    (the expert in `after` that was not in `before`). Compared are the tokens of the prompts, which
    are the same in both runs.

    Raises:
        RequestError: the runs did not run the same prompts.
    """
    prompt, other = (run.completions[0].prompt_token_ids for run in (before, after))
    if prompt != other:
        raise RequestError(
            f"the runs have different prompts, of {len(prompt)} and {len(other)} tokens; run the "
            "same text both times."
        )
    ids_TK, new_TK = (_choices(run, layer)[: len(prompt)] for run in (before, after))
    lost = [at for at in range(len(prompt)) if expert in ids_TK[at]]
    return pd.DataFrame(
        {
            "position": lost,
            "token": [before.tokens[at] for at in lost],
            "before": [tuple(ids_TK[at].tolist()) for at in lost],
            "after": [tuple(new_TK[at].tolist()) for at in lost],
            "newcomer": [
                next(iter({*new_TK[at].tolist()} - {*ids_TK[at].tolist()})) for at in lost
            ],
        }
    )


def _choices(run: Run, layer: int) -> np.ndarray:
    """Return the (T, K) experts of the first request's tokens in `layer`, by position."""
    trace = run.trace
    rows = trace.rows_of(run.completions[0].request_id)
    rows = rows[np.argsort(trace.columns["rows/positions"][rows], kind="stable")]
    place = trace.start.moe_layers.index(layer)
    return np.asarray(trace.columns["rows/topk_ids"][rows, place])
