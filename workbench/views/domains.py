"""Which experts does each domain use? A domain is the label a request was added with."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pandas as pd

from workbench.trace.trace import Trace, count_ids
from workbench.views.load import LOAD_FORMULA, load_values, shares
from workbench.views.rows import ACCEPTED, chosen_rows, row_domains
from workbench.views.tidy import LABEL, Column, join, table

DOMAIN_FORMULA = (
    f"{LOAD_FORMULA}, over the slots of one domain; lift = load / load over all domains"
)

DOMAIN_COLUMNS = {
    "domain": Column("str", 'label of the request; "" where it had none or is not known'),
    "layer": Column("int64", "the model's layer number"),
    "expert": Column("int64", "logical expert"),
    "rows": Column("int64", "slots of the domain that chose the expert"),
    "share": Column("float64", "rows / rows of the domain in the layer, 0 to 1; NaN without rows"),
    "load": Column("float64", "share x experts; 1 is the fair share, at most E / K"),
    "lift": Column("float64", "load / load over all domains; NaN where nobody chose the expert"),
    "label": LABEL,
}


def domain_load(
    trace: Trace, *, causes: Collection[str] | None = ACCEPTED, label: str = "recorded"
) -> pd.DataFrame:
    """Return one line per domain, layer and expert, `DOMAIN_COLUMNS`, by `DOMAIN_FORMULA`.

    Domains come in the order of their names. The rows of all domains sum to `expert_load`'s.

    Args:
        trace: what to read.
        causes: rows that count; the default leaves out rows that ran again, None takes all.
        label: where the numbers come from, see `workbench.views.tidy.LABELS`.

    Raises:
        ConfigError: an unknown cause or label.
    """
    experts = trace.start.num_experts
    kept = chosen_rows(trace, causes)
    ids_NLK, domains = trace.columns["rows/topk_ids"][kept], row_domains(trace)[kept]
    overall_LE = shares(count_ids(ids_NLK, experts))
    parts = []
    for domain in sorted(set(domains.tolist())):
        counts_LE = count_ids(ids_NLK[domains == domain], experts)
        lift_LE = shares(counts_LE) / np.where(overall_LE > 0, overall_LE, np.nan)
        values = {
            "domain": [domain] * counts_LE.size,
            **load_values(trace.start.moe_layers, "expert", counts_LE),
            "lift": lift_LE.ravel(),
        }
        parts.append(table(DOMAIN_COLUMNS, values, label))
    return join(DOMAIN_COLUMNS, parts, label)
