"""Try tiles on this device, within a time budget, and write the best where the engine finds them.

For each scheme and block size: start from the default, change one setting at a time, keep what is
faster by 2 % or more. Block sizes take turns, so that a short budget improves all of them a little.
What was not reached keeps its default, and is not written.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from workbench.bench.gpu import ours
from workbench.bench.gpu.inputs import Batch, batch
from workbench.bench.gpu.setting import Setting
from workbench.bench.gpu.shapes import Shape
from workbench.bench.gpu.timing import milliseconds

if TYPE_CHECKING:
    from engine.kernels.gpu.experts import ExpertStack
    from engine.kernels.gpu.tiles import Tile

GAIN = 0.98
TUNED_ON = {
    "native": Shape(name="tuned", hidden=2048, width=1024, num_experts=64, top_k=8),
    "e4m3": Shape(name="tuned", hidden=7168, width=2048, num_experts=32, top_k=8, scheme="e4m3"),
}
"""OLMoE's layer, and an eighth of DeepSeek-V3's: all experts are read, as on one of its ranks."""
BLOCKS = (16, 32, 64, 128)
"""Rows of one expert in a block."""
CHANGES: dict[str, tuple[int, ...]] = {
    "features": (64, 128, 256),
    "depth": (64, 128),
    "num_stages": (2, 3, 4, 5),
    "num_warps": (4, 8),
    "group": (1, 8, 16),
}
PARTS = 8
"""Processes that compile tiles beforehand."""


@dataclass(slots=True)
class Search:
    """The search for one scheme and block size."""

    scheme: str
    rows: int
    experts: ExpertStack
    batches: list[Batch]
    gate_up: Tile
    down: Tile
    waiting: Iterator[tuple[str, str, int]]
    ms: float
    default_ms: float
    tried: int = 0
    refused: int = 0
    """Tiles that did not compile or did not fit."""


def run(setting: Setting) -> None:
    """Search until the time is up, keep a row for each search, write the file."""
    searches: list[Search] = []
    for scheme, shape in _shapes(setting).items():
        with setting.case(scheme=scheme, what="weights") as row:
            experts = ours.stack(shape, setting.device, torch.bfloat16)
            row["experts"] = shape.num_experts
        for rows in BLOCKS[:1] if setting.dry else BLOCKS:
            if "error" in row or setting.late(scheme=scheme, rows=rows):
                continue
            with setting.case(scheme=scheme, rows=rows, what="default") as start:
                search = _start(setting, shape, experts, rows)
                start["tile"] = str(search.gate_up)
                searches.append(search)
    going = list(searches)
    while going and setting.seconds_left > 0:
        going = [search for search in going if _step(setting, search)]
        if setting.dry:
            break
    for search in searches:
        with setting.case(scheme=search.scheme, rows=search.rows) as row:
            row |= {"gate_up": str(search.gate_up), "down": str(search.down)}
            row |= {"tried": search.tried, "refused": search.refused}
            if not setting.dry:
                row |= {"default_ms": search.default_ms, "tuned_ms": search.ms}
    _save(setting, searches)


def prepare(setting: Setting, *, part: int) -> None:
    """Compile one part of the tiles that a search tries first, so that it finds them in the cache.

    Those are the defaults with one setting changed; what does not compile is met again, and
    counted, in the search.
    """
    from engine.kernels.gpu.tiles import default_tiles

    number = 0
    for scheme, shape in _shapes(setting).items():
        experts = ours.stack(shape, setting.device, torch.bfloat16)
        for rows in BLOCKS:
            sides = default_tiles(scheme, "bfloat16", rows)
            changed = [
                {side: replace(sides[side == "down"], **{field: value})}
                for side, field, value in _changes()
            ]
            for change in [{}, *changed]:
                number += 1
                if number % PARTS != part or setting.seconds_left <= 0:
                    continue
                with contextlib.suppress(Exception):
                    _once(setting, shape, experts, rows, change)
    setting.keep({"part": part, "of": PARTS, "tiles": number})


def _shapes(setting: Setting) -> dict[str, Shape]:
    if setting.dry:
        return {
            scheme: replace(shape, hidden=64, width=32, num_experts=4, top_k=2)
            for scheme, shape in TUNED_ON.items()
        }
    return {
        scheme: shape for scheme, shape in TUNED_ON.items() if setting.has_fp8 or scheme != "e4m3"
    }


def _start(setting: Setting, shape: Shape, experts: ExpertStack, rows: int) -> Search:
    from engine.kernels.gpu.tiles import default_tiles

    tokens = rows * shape.num_experts // shape.top_k
    batches = [batch(shape, tokens, setting.device, torch.bfloat16, seed=seed) for seed in range(2)]
    gate_up, down = default_tiles(shape.scheme, "bfloat16", rows)
    waiting = _changes()
    search = Search(shape.scheme, rows, experts, batches, gate_up, down, waiting, 0.0, 0.0)
    search.ms = search.default_ms = _time(setting, search, gate_up, down)
    return search


def _batch(setting: Setting, shape: Shape, rows: int, seed: int = 0) -> Batch:
    """Return as many tokens as give each expert about `rows` rows."""
    tokens = rows * shape.num_experts // shape.top_k
    return batch(shape, tokens, setting.device, torch.bfloat16, seed=seed)


def _once(
    setting: Setting, shape: Shape, experts: ExpertStack, rows: int, change: dict[str, Tile]
) -> None:
    """Run the layer once with the default tiles but for `change`."""
    from engine.kernels.gpu.tiles import TileChoice, default_tiles

    gate_up, down = default_tiles(shape.scheme, "bfloat16", rows)
    sides = {"gate_up": gate_up, "down": down} | change
    one = _batch(setting, shape, rows)
    ours.layer(experts, one, tiles=TileChoice(**sides, reason="tried"))[0](one)
    torch.cuda.synchronize()


def _changes() -> Iterator[tuple[str, str, int]]:
    for field, values in CHANGES.items():
        for value in values:
            for side in ("gate_up", "down"):
                yield side, field, value


def _step(setting: Setting, search: Search) -> bool:
    """Try the next change; return whether another waits."""
    for side, field, value in search.waiting:
        sides = {"gate_up": search.gate_up, "down": search.down}
        changed = replace(sides[side], **{field: value})
        if changed == sides[side]:
            continue
        sides[side] = changed
        search.tried += 1
        try:
            ms = _time(setting, search, sides["gate_up"], sides["down"])
        except Exception:  # too much shared memory, say; the next tile is another matter
            search.refused += 1
            return True
        if ms < search.ms * GAIN:
            search.ms, search.gate_up, search.down = ms, sides["gate_up"], sides["down"]
        return True
    return False


def _time(setting: Setting, search: Search, gate_up: Tile, down: Tile) -> float:
    from engine.kernels.gpu.tiles import TileChoice

    tiles = TileChoice(gate_up, down, "tried")
    call, _ = ours.layer(search.experts, search.batches[0], tiles=tiles)
    return milliseconds([partial(call, one) for one in search.batches], setting.device)


def _save(setting: Setting, searches: list[Search]) -> None:
    """Write what was searched; a scheme and block size that was not keeps its earlier entry."""
    from engine.kernels.gpu.tiles import TUNED, load_tuned, save_tuned, slug

    device = "cpu-dry-run" if setting.dry else torch.cuda.get_device_name()
    best = {
        (search.scheme, "bfloat16", search.rows): (search.gate_up, search.down)
        for search in searches
        if search.tried
    }
    if not best:
        return
    folders = [TUNED] if not setting.dry else []
    folders += [setting.out] if setting.out else []
    for folder in folders:
        with setting.case(what="file") as row:
            name = f"{slug(device)}.json" if folder == TUNED else f"tuned-{slug(device)}.json"
            date = datetime.date.today().isoformat()
            earlier = load_tuned(folder / name).items()
            kept = {key: (choice.gate_up, choice.down) for key, choice in earlier}
            save_tuned(folder / name, device, date, kept | best)
            row["file"] = name
