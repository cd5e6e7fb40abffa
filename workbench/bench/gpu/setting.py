"""What a section is given: the device, the sizes, its deadline, and where its rows go."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from workbench.bench.gpu.shapes import SHAPES, TINY, TINY_TOKENS, TOKENS, Shape

Row = dict[str, Any]
NO_FP8 = "this chip does not multiply e4m3"


@dataclass(kw_only=True, slots=True)
class Setting:
    """One section's run."""

    dry: bool
    """On the CPU, in Triton's interpreter, with tiny shapes; nothing is a measurement then."""
    deadline: float
    """Of `time.monotonic`."""
    path: Path
    """Where rows are kept as they come, one JSON object a line."""
    ceilings: Row = field(default_factory=dict)
    """What the section `ceilings` found: `copy_gbs`, `bf16_tflops`, `fp8_tflops`."""
    out: Path | None = None
    """A folder that gets a copy of the tuned tiles."""

    @property
    def device(self) -> torch.device:
        """The GPU, or the CPU of a dry run."""
        return torch.device("cpu" if self.dry else "cuda")

    @property
    def shapes(self) -> dict[str, Shape]:
        """Name -> layer."""
        return TINY if self.dry else SHAPES

    @property
    def tokens(self) -> tuple[int, ...]:
        """Batch sizes."""
        return TINY_TOKENS if self.dry else TOKENS

    @property
    def seconds_left(self) -> float:
        """Until the deadline; below 0 when it is past."""
        return self.deadline - time.monotonic()

    @property
    def has_fp8(self) -> bool:
        """Whether the device multiplies e4m3."""
        return self.dry or torch.cuda.get_device_capability() >= (8, 9)

    def keep(self, row: Row) -> None:
        """Write a row down at once: what comes later may end the process."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_plain(row), allow_nan=False) + "\n")

    def fits(self, needed_bytes: int) -> bool:
        """Whether the device has room for this much, with a tenth to spare."""
        return self.dry or needed_bytes * 1.1 < torch.cuda.mem_get_info()[0]

    @contextmanager
    def case(self, **names: Any) -> Iterator[Row]:
        """Run one case; its row is kept whether it works, fails or comes too late.

        ``with setting.case(tokens=8) as row: row["ours_ms"] = …`` keeps `error` with the text of
        what was raised, and runs on with the next case.
        """
        row: Row = dict(names)
        try:
            yield row
        except Exception as wrong:  # whatever it is, it belongs in the report
            row["error"] = sentence(wrong)
        self.keep(row)
        if not self.dry:
            torch.cuda.empty_cache()

    def late(self, **names: Any) -> bool:
        """Whether the time is up; if so, a row says that the case was not run."""
        if self.seconds_left > 0:
            return False
        self.keep(names | {"skipped": "the section's time was up"})
        return True


def sentence(wrong: BaseException) -> str:
    """Return an exception as one line of at most 400 characters."""
    text = " ".join(f"{type(wrong).__name__}: {wrong}".split())
    return text if len(text) <= 400 else text[:397] + "…"


def _plain(value: Any) -> Any:
    """Return a value as JSON knows it: NaN and infinities as words."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
