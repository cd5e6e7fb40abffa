"""How a demo's numbers are said, in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOTHING = "–"


def check_line(check: Mapping[str, Any]) -> str:
    """Return one expectation with what was measured and the bounds.

    `Load on expert 0: 3.71 × (at least 2.5 ×), after 3 s`
    """
    return (
        f"{check['name']}: {measured(check)} ({bounds(check)}), after {check['seconds']:.0f} s"
        if check["value"] is not None
        else f"{check['name']}: not measured in {check['seconds']:.0f} s ({bounds(check)})"
    )


def measured(check: Mapping[str, Any]) -> str:
    """Return the value with its unit; a dash where nothing was measured yet."""
    value, unit = check["value"], check["unit"]
    if value is None:
        return NOTHING
    return f"{100 * value:.1f} %" if unit == "share" else f"{_number(value)} {unit}".rstrip()


def bounds(check: Mapping[str, Any]) -> str:
    """Return the bounds in words; a bound that a measure cannot pass is left out."""
    low, high = (_number(100 * x if check["unit"] == "share" else x) for x in _ends(check))
    unit = "%" if check["unit"] == "share" else check["unit"]
    unit = f" {unit}" if unit else ""
    if low == high:
        return f"exactly {low}{unit}"
    if check["low"] <= 0:
        return f"at most {high}{unit}"
    if check["high"] >= _TOP.get(check["unit"], 1e5):
        return f"at least {low}{unit}"
    return f"{low} to {high}{unit}"


_TOP = {"share": 1.0, "tokens": 512}


def _ends(check: Mapping[str, Any]) -> tuple[float, float]:
    return float(check["low"]), float(check["high"])


def _number(value: float) -> str:
    """Write four figures at most, whole numbers without a point."""
    if value == round(value) and abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.4g}"
