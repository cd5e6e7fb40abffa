"""The engine that formats are measured on: one process, bf16 beside INT8."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from engine import Engine, EngineConfig
from engine.checkpoint.load import read_config
from engine.checkpoint.manifest import fingerprint
from engine.events import Sink
from engine.routing.precision import FILE, Thresholds
from workbench.paths import model_folder


def open_both(
    model: str,
    *,
    thresholds: Path | None = None,
    threads: int | None = None,
    measuring: bool,
    sink: Sink | None = None,
) -> tuple[Engine, Thresholds, Path]:
    """Return an engine that holds both formats, its thresholds and where they lie.

    Args:
        model: folder, or name of a bundled model.
        thresholds: their file; None takes the one beside the model.
        threads: of one product.
        measuring: whether limits that let all pass stand in for the file, which need not be there.
        sink: who listens to the engine.

    Raises:
        CheckpointError, ConfigError: the model or the thresholds cannot be used.
    """
    folder = model_folder(model)
    path = thresholds or Path(folder) / FILE
    layers = len(read_config(folder).moe_layers)
    options: dict[str, Any] = {"num_threads": threads, "num_blocks": 256, "max_step_tokens": 256}

    def opened(file: Path) -> Engine:
        return Engine(
            EngineConfig(
                model=folder, dtype="bfloat16", precision="auto", precision_file=file, **options
            ),
            sink=sink,
        )

    if not measuring:
        engine = opened(path)
        found = engine.control.policy.precision.thresholds
        assert found is not None, "an engine with precision auto has thresholds"
        return engine, found, path
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / FILE
        base = Thresholds.open(layers, weights_sha256=fingerprint(folder))
        base.save(file)
        return opened(file), base, path
