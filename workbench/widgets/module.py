"""The widgets' browser side as text: one ES module and one style sheet for each widget.

What both widgets share stands in `host.js` and `host.css` and is joined in front, so that a host
gets one self-contained module and never asks for a second file.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

_HERE = Path(__file__).parent


@cache
def script(widget: str) -> str:
    """Return the ES module of `live_map` or `token_stepper`."""
    return _joined("host.js", f"{widget}.js")


@cache
def styles(widget: str) -> str:
    """Return the style sheet of `live_map` or `token_stepper`."""
    return _joined("host.css", f"{widget}.css")


def _joined(*names: str) -> str:
    return "\n".join((_HERE / name).read_text(encoding="utf-8") for name in names)
