"""How well the model foresees texts, by domain: what a change of the routing costs in quality."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from workbench.lessons.small import Labelled, SmallEngine


def surprise(small: SmallEngine, prompts: Sequence[Labelled]) -> pd.Series[float]:
    """Return the mean surprise by domain, in bits per token, under the policy now in force.

    A token foreseen with probability p surprises by -log2 p bits: 1/2 by 1 bit, 1/8 by 3. The first
    token of a text follows the model's own mark and counts as well.

    Raises:
        RequestError: a text is empty or too long, or requests are under way.
    """
    bits: dict[str, list[float]] = {}
    for domain, text in prompts:
        ids = small.tokenizer.encode(text)
        logits_TV = small.engine.logits(ids)[:-1].astype(np.float64)
        logits_TV -= logits_TV.max(axis=1, keepdims=True)
        total_T = np.log2(np.exp(logits_TV).sum(axis=1))
        own_T = logits_TV[np.arange(len(ids) - 1), ids[1:]] / np.log(2)
        bits.setdefault(domain, []).extend((total_T - own_T).tolist())
    means = {domain: float(np.mean(values)) for domain, values in sorted(bits.items())}
    return pd.Series(means, name="bits per token", dtype="float64").rename_axis("domain")
