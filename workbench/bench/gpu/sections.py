"""What is run, in which order, and how long each may take; the whole stays under four minutes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from workbench.bench.gpu import ceilings, correctness, gate, large, layer, ranks, tuning
from workbench.bench.gpu.setting import Setting
from workbench.bench.gpu.shapes import SHAPES

TOTAL_SECONDS = 234
"""For everything; a section begins with at most what is left of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One part of the script, run in a process of its own."""

    name: str
    run: Callable[[Setting], None]
    wave: int
    """Sections of one wave run side by side: none of them measures time."""
    seconds: int
    """From the start of its process; a case that would begin later is not run."""
    needs: tuple[str, ...] = ()
    """Sections that run before it even when they were not asked for."""
    dry: bool = True
    """Whether a dry run has it."""


SECTIONS = (
    Section(name="ceilings", run=ceilings.run, wave=0, seconds=14),
    Section(name="correctness", run=correctness.run, wave=1, seconds=40),
    Section(name="formats", run=correctness.formats, wave=1, seconds=40),
    Section(name="large", run=large.run, wave=1, seconds=40),
    # Compiles, on as many cores, the tiles that the next wave tries.
    *(
        Section(
            name=f"prepare-tiles-{part}",
            run=partial(tuning.prepare, part=part),
            wave=1,
            seconds=40,
            dry=False,
        )
        for part in range(tuning.PARTS)
    ),
    Section(
        name="tune",
        run=tuning.run,
        wave=2,
        seconds=34,
        needs=tuple(f"prepare-tiles-{part}" for part in range(tuning.PARTS)),
    ),
    # Likewise what the published layers take, now that the tiles are known.
    *(
        Section(
            name=f"prepare-{name}",
            run=partial(layer.prepare, name=name),
            wave=3,
            seconds=24,
            dry=False,
        )
        for name in SHAPES
    ),
    *(
        Section(
            name=name,
            run=partial(layer.run, name=name),
            wave=4 + number,
            seconds=22,
            needs=("ceilings", f"prepare-{name}"),
            dry=number in (0, len(SHAPES) - 1),  # one in bf16, one in fp8
        )
        for number, name in enumerate(SHAPES)
    ),
    Section(name="gate", run=gate.run, wave=9, seconds=12),
    Section(name="ranks", run=ranks.run, wave=10, seconds=22),
)
BY_NAME = {section.name: section for section in SECTIONS}
