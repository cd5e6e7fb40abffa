"""What the page *Experts* says about the recent past: the views' numbers, laid out by layer.

Nothing is counted here that `workbench.views` does not count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from workbench import views
from workbench.trace import Trace

Float = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Digest:
    """Traffic, jumps and balance over one trace."""

    rows: int
    """Token rows it rests on."""
    layers: tuple[int, ...]
    flow_LDD: Float
    """(L, D, D) rows from the home of a token to the device of its expert."""
    unplaced: int
    """Rows whose home or device is not known; they are in no cell."""
    balance: dict[str, tuple[Float, Float]]
    """By measure: (L,) between experts, (L,) between devices; NaN without rows."""
    jumps: dict[str, tuple[Float, Float]]
    """By choice (`set`, `first`): (L,) rate, (L,) rate of unrelated tokens; NaN without pairs."""

    @property
    def flow_DD(self) -> Float:
        """(D, D) rows over all layers."""
        return self.flow_LDD.sum(axis=0)

    @property
    def crossing(self) -> float:
        """Share of rows that leave their home, 0 to 1; NaN without rows."""
        flow = self.flow_DD
        return float(1 - np.trace(flow) / flow.sum()) if flow.sum() else float("nan")


def digest(trace: Trace) -> Digest:
    """Return the digest of a trace."""
    layers, devices = trace.start.moe_layers, trace.start.num_devices
    traffic = views.device_traffic(trace)
    known = traffic[(traffic["home"] >= 0) & (traffic["device"] >= 0)]
    flow = np.zeros((len(layers), devices, devices))
    at = known["layer"].map({layer: at for at, layer in enumerate(layers)}).to_numpy(int)
    flow[at, known["home"].to_numpy(), known["device"].to_numpy()] = known["rows"].to_numpy()
    by_expert, by_device = views.load_balance(trace), views.load_balance(trace, per="device")
    jumps = views.jump_rate(trace)

    def lines(table: pd.DataFrame, key: str, word: str, name: str) -> Float:
        """Return a column by layer, NaN where the view has no line."""
        found = table[table[key] == word].set_index("layer")[name]
        return np.asarray(found.reindex(list(layers)), np.float64)

    return Digest(
        rows=trace.num_rows,
        layers=layers,
        flow_LDD=flow,
        unplaced=int(traffic["rows"].sum() - known["rows"].sum()),
        balance={
            measure: (
                lines(by_expert, "measure", measure, "value"),
                lines(by_device, "measure", measure, "value"),
            )
            for measure in views.BALANCE_FORMULAS
        },
        jumps={
            choice: (
                lines(jumps, "choice", choice, "rate"),
                lines(jumps, "choice", choice, "expected"),
            )
            for choice in ("set", "first")
        },
    )
