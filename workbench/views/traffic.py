"""How many rows and bytes go from the device that owns a token to the devices of its experts?"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pandas as pd

from engine.errors import ConfigError
from workbench.trace.schema import Array
from workbench.trace.trace import Trace
from workbench.views.devices import NOWHERE, devices_of_pairs
from workbench.views.rows import chosen_rows
from workbench.views.tidy import LABEL, Column, check_label, join, table

VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one activation by the engine's number format."""

TRAFFIC_FORMULA = (
    "bytes = rows x hidden_size x bytes of one value, one way (dispatch); "
    "combine brings as many back"
)

TRAFFIC_COLUMNS = {
    "layer": Column("int64", "the model's layer number"),
    "home": Column("int64", "device whose attention owns the token; -1: out of range"),
    "device": Column("int64", "device of the expert; -1: the table of that version is not known"),
    "rows": Column("int64", "slots, as dispatch moves them"),
    "tokens": Column("int64", "rows with at least one expert there: what one copy a device sends"),
    "bytes": Column("float64", "rows in bytes, one way; NaN without hidden_size"),
    "crosses": Column("bool", "whether the device is another than the home"),
    "bytes_label": Column("str", "measured, modelled or recorded, for bytes"),
    "label": LABEL,
}


def device_traffic(
    trace: Trace,
    *,
    hidden_size: int | None = None,
    tables: Mapping[int, Sequence[int]] | None = None,
    causes: Collection[str] | None = None,
    label: str = "recorded",
    bytes_label: str = "modelled",
) -> pd.DataFrame:
    """Return one line per layer, home and device, `TRAFFIC_COLUMNS`, by `TRAFFIC_FORMULA`.

    Every pair of devices has its line, also with 0 rows; device -1 only where it has some.
    Between logical devices nothing is sent, so bytes are modelled: what real ones would send.

    Args:
        trace: what to read.
        hidden_size: width of a row (`engine.model_config.hidden_size`); None leaves bytes NaN.
        tables: `rank_of_phy` by table version, beside those in the trace.
        causes: rows that count; all by default, because a row that ran again was moved again.
        label: where the rows come from, see `workbench.views.tidy.LABELS`.
        bytes_label: where the bytes come from, likewise.

    Raises:
        ConfigError: an unknown cause or label, or a hidden_size below 1.
    """
    check_label(bytes_label)
    if hidden_size is not None and hidden_size < 1:
        raise ConfigError(f"hidden_size ({hidden_size}) must be at least 1.")
    num_devices = trace.start.num_devices
    kept = chosen_rows(trace, causes)
    devices_NLK = devices_of_pairs(trace, tables)[kept]
    homes_N = trace.columns["rows/homes"][kept].astype(np.int64)
    homes_N = np.where((homes_N >= 0) & (homes_N < num_devices), homes_N, -1)
    row_bytes = (hidden_size or np.nan) * VALUE_BYTES.get(trace.start.dtype, 4)
    parts = []
    for index, layer in enumerate(trace.start.moe_layers):
        rows, tokens = _count(homes_N, devices_NLK[:, index], num_devices)
        home, device = np.divmod(np.arange(rows.size), num_devices + 1)
        shown = ((home < num_devices) & (device < num_devices)) | (rows.ravel() > 0)
        home = np.where(home == num_devices, -1, home)[shown]
        device = np.where(device == num_devices, -1, device)[shown]
        values = {
            "layer": np.full(len(home), layer),
            "home": home,
            "device": device,
            "rows": rows.ravel()[shown],
            "tokens": tokens.ravel()[shown],
            "bytes": rows.ravel()[shown] * row_bytes,
            "crosses": home != device,
            "bytes_label": [bytes_label] * len(home),
        }
        parts.append(table(TRAFFIC_COLUMNS, values, label))
    return join(TRAFFIC_COLUMNS, parts, label)


def _count(homes_N: Array, devices_NK: Array, num_devices: int) -> tuple[Array, Array]:
    """Count pairs and rows by (home, device), (G + 1, G + 1) each; the last stands for unknown."""
    shape = (num_devices + 1, num_devices + 1)
    pairs, tokens = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    devices_NK = np.where((devices_NK < 0) & (devices_NK != NOWHERE), num_devices, devices_NK)
    homes_N = np.where(homes_N < 0, num_devices, homes_N)
    for device in range(num_devices + 1):
        slots_N = (devices_NK == device).sum(axis=1)
        np.add.at(pairs[:, device], homes_N, slots_N)
        np.add.at(tokens[:, device], homes_N, slots_N > 0)
    return pairs, tokens
