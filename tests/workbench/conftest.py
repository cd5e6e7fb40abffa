"""What the workbench's tests share."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.events import Event
from workbench.trace import Recorder, Trace, save
from workbench.trace import synthetic as made


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(
            one, other, equal_nan=one.dtype.kind == "f"
        )
    if is_dataclass(one):
        return type(one) is type(other) and all(
            _same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one)
        )
    if isinstance(one, tuple | list):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and one == other


@pytest.fixture(scope="session")
def same() -> Callable[[Any, Any], bool]:
    """Compare two values, records and arrays included, by type and bit."""
    return _same


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON object on stdout; fails if anything else is there."""
        assert self.code == 0, self.err
        assert self.out.count("\n") == 1 and self.out.endswith("}\n")
        value = json.loads(self.out, parse_constant=lambda word: pytest.fail(f"{word} in JSON"))
        assert isinstance(value, dict)
        return value

    def assert_refused(self, code: int, *words: str) -> None:
        """Check that the command said one sentence on stderr and nothing on stdout."""
        assert (self.code, self.out) == (code, ""), self
        assert self.err.startswith("workbench: ") and self.err.endswith((".\n", "?\n")), self.err
        assert self.err.count("\n") == 1 and "Traceback" not in self.err
        for word in words:
            assert word in self.err


@pytest.fixture
def workbench(capfd, monkeypatch) -> Callable[..., Ended]:
    """Run the command line in this process: `workbench("generate", "text", stdin=b"")`."""
    from workbench.cli import main

    def run(*argv: str | Path, stdin: bytes = b"") -> Ended:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main([str(word) for word in argv])
        out, err = capfd.readouterr()
        return Ended(code, out, err)

    return run


def record(events: Iterable[Event]) -> Trace:
    """Return the trace of these events."""
    recorder = Recorder()
    for event in events:
        recorder.emit(event)
    return recorder.trace()


@pytest.fixture
def trace() -> Trace:
    """A trace of six steps."""
    return record(made.run(made.start_event(), steps=6, rows=3))


@pytest.fixture
def file(trace: Trace, tmp_path: Path) -> Path:
    """Its file."""
    return save(trace, tmp_path / "run.moetrace")
