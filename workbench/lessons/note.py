"""A piece of text as the answer of a cell: markdown in a notebook, plain text anywhere else."""

from __future__ import annotations

from collections.abc import Sequence


class Note:
    """Markdown that a notebook renders in its own colours, light or dark."""

    def __init__(self, markdown: str) -> None:
        self.markdown = markdown

    def __str__(self) -> str:
        return self.markdown

    def __repr__(self) -> str:
        return self.markdown

    def _repr_markdown_(self) -> str:
        return self.markdown


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a markdown table; a bar inside a cell is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def code(text: str) -> str:
    """Return `text` as markdown code that may hold backticks and shows its spaces."""
    shown = text.replace("\n", "⏎").replace("\t", "⇥")
    fence = "``" if "`" in shown else "`"
    pad = " " if fence == "``" or shown != shown.strip() or not shown else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
