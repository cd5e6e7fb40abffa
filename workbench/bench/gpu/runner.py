"""Run the sections wave by wave, each in a process of its own, and gather what they kept."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from workbench import paths
from workbench.bench.gpu.report import Report
from workbench.bench.gpu.sections import BY_NAME, SECTIONS, TOTAL_SECONDS, Section
from workbench.bench.gpu.setting import Row

GRACE_SECONDS = 3.0
"""A section that is this much over its time is ended."""
CHILD = "workbench.bench.gpu.child"
LAST_LINES = 3
DRY_AT_ONCE = 4
DRY_SECONDS = 100
"""For each section of a dry run: an interpreter on a busy machine is slow."""


def run(
    *,
    names: Sequence[str] = (),
    tune_seconds: int | None = None,
    dry: bool = False,
    out: Path | None = None,
    say: Callable[[str], None] = print,
) -> Report:
    """Run sections in their order and return the report.

    Args:
        names: sections; none means all. What they need runs too.
        tune_seconds: for the section `tune`; 0 leaves it out, None takes its own.
        dry: whether to run on the CPU, in the interpreter, with tiny shapes.
        out: a folder that gets a copy of the tuned tiles.
        say: told of each section as it ends.
    """
    began = time.monotonic()
    found: dict[str, Report] = {}
    machine: Row = {}
    command = _command(names, tune_seconds, dry)
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyboardInterrupt):
        for wave in _waves(names, tune_seconds, dry):
            left = TOTAL_SECONDS - int(time.monotonic() - began)
            running = []
            for section, seconds in wave:
                found[section.name] = {"rows": [], "error": "not finished", "seconds": 0.0}
                allowed = DRY_SECONDS if dry else min(seconds, left)
                if allowed <= 0:
                    found[section.name]["error"] = "no time was left for it"
                    continue
                spec: Row = {"section": section.name, "dry": dry, "seconds": allowed}
                spec |= {"ceilings": _ceilings(found), "out": str(out) if out else None}
                running.append(_start(spec, Path(folder)))
            for name, result, on in _ended(running):
                found[name], machine = result, machine or on
                say(f"{name}: {result['seconds']} s, {_words(result)}")
    return {
        "device": machine.get("device", "unknown device"),
        "label": "dry run" if dry else "measured",
        "command": command,
        "seconds": round(time.monotonic() - began, 1),
        "machine": machine,
        "sections": found,
    }


def known_sections() -> tuple[str, ...]:
    """Return the names worth asking for; what they need comes along."""
    return tuple(name for name in BY_NAME if not name.startswith("prepare-"))


def well(report: Report) -> bool:
    """Whether every section ran to its end and every result that was checked is right."""
    return all(
        not section["error"]
        and not any("error" in row or row.get("right") is False for row in section["rows"])
        for section in report["sections"].values()
    )


def _waves(
    names: Sequence[str], tune_seconds: int | None, dry: bool
) -> Iterator[list[tuple[Section, int]]]:
    """Yield the sections of each wave with their seconds."""
    wanted = set(names or BY_NAME)
    if tune_seconds == 0:
        wanted -= {"tune", *BY_NAME["tune"].needs}
    wanted |= {needed for name in wanted for needed in BY_NAME[name].needs}
    kept = [
        (section, tune_seconds if section.name == "tune" and tune_seconds else section.seconds)
        for section in SECTIONS
        if section.name in wanted and (section.dry or not dry)
    ]
    if dry:  # nothing is timed, so that order and company do not matter
        yield from (kept[at : at + DRY_AT_ONCE] for at in range(0, len(kept), DRY_AT_ONCE))
        return
    for _, wave in groupby(kept, key=lambda one: one[0].wave):
        yield list(wave)


@dataclass(slots=True)
class _Child:
    """A section's process."""

    name: str
    process: subprocess.Popen[bytes]
    began: float
    seconds: int
    rows: Path
    said: Path
    """What it writes to stderr."""

    def wait(self) -> str | None:
        """Wait for its end, bring it about when it is over its time; return what went wrong."""
        left = self.began + self.seconds + GRACE_SECONDS - time.monotonic()
        try:
            code = self.process.wait(timeout=max(left, 0.0))
        except subprocess.TimeoutExpired:
            self.end()
            return f"ended: it was not done {GRACE_SECONDS:.0f} s after its {self.seconds} s"
        if code == 0:
            return None
        said = self.said.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = " / ".join(said[-LAST_LINES:]) or "it said nothing"
        return f"its process ended with {code}: {last}"[:600]

    def end(self) -> None:
        """End it and every process it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _start(spec: Row, folder: Path) -> _Child:
    name = spec["section"]
    rows, said = folder / f"{name}.jsonl", folder / f"{name}.stderr"
    environment = dict(os.environ)
    if spec["dry"]:
        environment["TRITON_INTERPRET"] = "1"
    with said.open("wb") as errors:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                CHILD,
                json.dumps(spec | {"path": str(rows)}),
            ],
            cwd=paths.root(),
            env=environment,
            stdin=subprocess.PIPE,  # it ends with us: nothing is ever written
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
    return _Child(name, process, time.monotonic(), spec["seconds"], rows, said)


def _ended(running: list[_Child]) -> Iterator[tuple[str, Report, Row]]:
    """Yield each section's name, result and machine as it ends; an interrupt ends them all."""
    try:
        for child in running:
            error = child.wait()
            rows = _rows(child.rows)
            machine = rows.pop(0)["machine"] if rows and "machine" in rows[0] else {}
            spent = round(time.monotonic() - child.began, 1)
            yield child.name, {"rows": rows, "error": error, "seconds": spent}, machine
    finally:
        for child in running:
            if child.process.poll() is None:
                child.end()
            assert child.process.stdin is not None
            child.process.stdin.close()


def _rows(path: Path) -> list[Row]:
    """Return the rows that were kept; one that an end cut short is left out."""
    rows = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
    return rows


def _ceilings(found: dict[str, Report]) -> Row:
    rows = found.get("ceilings", {"rows": []})["rows"]
    return {row["ceiling"]: row["value"] for row in rows if "value" in row}


def _words(section: Report) -> str:
    rows = section["rows"]
    bad = sum("error" in row or row.get("right") is False for row in rows)
    text = f"{len(rows)} rows" + (f", {bad} of them bad" if bad else "")
    return text + (f"; {section['error']}" if section["error"] else "")


def _command(names: Sequence[str], tune_seconds: int | None, dry: bool) -> str:
    words = [word for name in names for word in ("--section", name)]
    words += ["--tune", str(tune_seconds)] if tune_seconds is not None else []
    words += ["--dry-run"] if dry else []
    return shlex.join(["python", "-m", "workbench.bench.gpu", *words])
