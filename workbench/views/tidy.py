"""How a view's table is described and built: named, typed, documented columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import pandas as pd

from engine.errors import ConfigError

Label = Literal["measured", "modelled", "recorded"]
"""Where numbers come from: a running engine, a model of the machine, or a file."""

LABELS: tuple[str, ...] = get_args(Label)


class Column(NamedTuple):
    """One column of a view."""

    dtype: str
    meaning: str
    """What it holds, with its unit."""


LABEL = Column("str", "measured, modelled or recorded")

Columns = Mapping[str, Column]


def table(columns: Columns, values: Mapping[str, Any], label: str) -> pd.DataFrame:
    """Return `values` as a DataFrame with exactly `columns`, in their order and dtypes.

    Args:
        columns: the view's columns; the last is `label`.
        values: (rows,) arrays or lists by column, all of one length; without `label`.
        label: one of `LABELS`, written into every row.

    Raises:
        ConfigError: `label` is not one of the three.
    """
    check_label(label)
    assert [*values, "label"] == list(columns), "a view fills its columns in their order"
    frame = pd.DataFrame(
        {name: pd.Series(values[name], dtype=columns[name].dtype) for name in values}
    )
    frame["label"] = pd.Series([label] * len(frame), dtype=LABEL.dtype, index=frame.index)
    return frame


def check_label(label: str) -> None:
    """Refuse a label that is none.

    Raises:
        ConfigError: `label` is not one of `LABELS`.
    """
    if label not in LABELS:
        raise ConfigError(f"label ({label!r}) must be one of {', '.join(LABELS)}.")


def join(columns: Columns, parts: list[pd.DataFrame], label: str) -> pd.DataFrame:
    """Return the parts below each other; no parts give the columns without rows.

    Raises:
        ConfigError: `label` is not one of the three.
    """
    if parts:
        return pd.concat(parts, ignore_index=True)
    empty: dict[str, list[Any]] = {name: [] for name in columns if name != "label"}
    return table(columns, empty, label)
