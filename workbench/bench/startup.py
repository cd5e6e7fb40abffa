"""How long a fresh process takes until the engine is ready, and until its first token.

Each round starts a new Python process that imports the engine, loads the model and generates one
token, and notes the time of each. Files are in the system's cache after the first round, which is
reported as such.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from engine.errors import MachineError, RequestError
from workbench.bench.machine import report

PROMPT = "The weather was fine"


def run(model: Path, *, dtype: str = "float32", rounds: int = 5) -> dict[str, Any]:
    """Measure `rounds` starts.

    Raises:
        RequestError: `rounds` is below 1.
        MachineError: the child process failed; its last line is in the message.
    """
    if rounds < 1:
        raise RequestError(f"rounds ({rounds}) must be a whole number of at least 1.")
    starts = [_start(model, dtype) for _ in range(rounds)]
    rows = [
        {
            "name": name,
            "ms_median": round(statistics.median(start[name] for start in starts), 1),
            "ms_first": round(starts[0][name], 1),
            "ms_best": round(min(start[name] for start in starts), 1),
            "rounds": rounds,
            "dtype": dtype,
        }
        for name in starts[0]
    ]
    words = f"--model {model.name} --dtype {dtype} --rounds {rounds}"
    return report(rows, f"workbench bench startup {words} --json")


def _start(model: Path, dtype: str) -> dict[str, float]:
    """Return milliseconds from the start of the process to each mark."""
    began = time.time()
    child = subprocess.run(
        [sys.executable, "-m", "workbench.bench.startup", str(model.resolve()), dtype],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    if child.returncode:
        lines = child.stderr.strip().splitlines() or ["it said nothing"]
        raise MachineError(f"a fresh engine did not start: {lines[-1]}")
    marks: dict[str, float] = json.loads(child.stdout.splitlines()[-1])
    return {name: (at - began) * 1e3 for name, at in marks.items()}


def _child(model: str, dtype: str) -> None:
    marks = {"python_running": time.time()}
    from engine import Engine, EngineConfig, SamplingParams

    Engine.step  # noqa: B018  (loads the engine's modules, and torch with them)
    marks["engine_imported"] = time.time()
    engine = Engine(EngineConfig(model=model, dtype=dtype))
    marks["ready"] = time.time()
    engine.add(PROMPT, SamplingParams(max_tokens=1))
    while not engine.step():
        pass
    marks["first_token"] = time.time()
    print(json.dumps(marks))


if __name__ == "__main__":
    _child(*sys.argv[1:3])
