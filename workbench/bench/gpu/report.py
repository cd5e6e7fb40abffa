"""Write what was found: a JSON file with everything, a Markdown page with what people look for."""

from __future__ import annotations

import datetime
import json
import math
import os
import re
from pathlib import Path
from typing import Any

Report = dict[str, Any]
VERSIONS = ("torch", "triton", "cuda", "python")


def slug(device: str) -> str:
    """Return a device's name for a file: `NVIDIA H200` is `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def write(report: Report, folder: Path) -> tuple[Path, Path]:
    """Write `<device>-<date>.json` and `.md`, whole or not at all, and return their paths.

    Raises:
        OSError: the folder does not take them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{slug(report['device'])}-{datetime.date.today().isoformat()}"
    as_json, as_page = folder / f"{stem}.json", folder / f"{stem}.md"
    _write(as_json, json.dumps(report, indent=1) + "\n")
    _write(as_page, page(report))
    return as_json, as_page


def _write(path: Path, text: str) -> None:
    """Write beside the place and move into it: an earlier report stays until this one is whole."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def page(report: Report) -> str:
    """Return the report as Markdown."""
    what = "Dry run: nothing here is a measurement" if report["label"] == "dry run" else "Measured"
    lines = [
        f"# {report['device']}",
        "",
        f"{what}; `{report['command']}`, {report['seconds']} s.",
        "",
    ]
    versions = [f"{name} {report['machine'].get(name, '?')}" for name in VERSIONS]
    lines += [", ".join(versions) + ".", ""]
    lines += ["| section | result | seconds |", "|---|---|---:|"]
    for name, section in report["sections"].items():
        lines.append(f"| {name} | {_cell(_outcome(section))} | {section['seconds']} |")
    for name, section in report["sections"].items():
        if section["rows"]:
            lines += ["", f"## {name}", "", *_table(section["rows"])]
    return "\n".join(lines) + "\n"


def _outcome(section: Report) -> str:
    rows = section["rows"]
    counts = {
        "wrong": sum(1 for row in rows if row.get("right") is False),
        "failed": sum(1 for row in rows if "error" in row),
        "not run": sum(1 for row in rows if "skipped" in row),
    }
    words = [section["error"]] if section["error"] else []
    words += [f"{number} {what}" for what, number in counts.items() if number]
    return f"{len(rows)} rows" + ("; " + "; ".join(words) if words else ", all well")


def _table(rows: list[Report]) -> list[str]:
    """Return a Markdown table with a column for every key but those that hold several values.

    These, such as the time of every peer, are in the JSON file.
    """
    keys = dict.fromkeys(key for row in rows for key in row)
    several = {key for row in rows for key, value in row.items() if isinstance(value, dict)}
    columns = [key for key in keys if key not in several]
    lines = ["| " + " | ".join(key.replace("_", " ") for key in columns) + " |"]
    lines.append("|" + "---|" * len(columns))
    for row in rows:
        lines.append("| " + " | ".join(_cell(row.get(key)) for key in columns) + " |")
    return lines


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    return str(value).replace("|", "\\|").replace("\n", " ")
