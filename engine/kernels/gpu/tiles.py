"""How large a piece of the experts' products one thread block computes, and why that size.

The features of the weights stand on the tensor cores' long side (64 rows at least on sm_90) and
the tokens on the short one (a multiple of 8), so that an expert with 16 rows still runs on the
widest instructions. A file `engine/kernels/tuned/<device>.json`, written by `python -m
workbench.bench.gpu --tune`, goes before the table below. Called by `engine.kernels.gpu`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from engine.errors import KernelError

TUNED = Path(__file__).parent.parent / "tuned"
SCHEMES = ("native", "w8a8", "w8a16", "e4m3", "mixed_int8", "mixed_e4m3")
"""How experts are computed: weights and rows in the rows' own format, both in int8, int8 weights
alone, both in e4m3, or block by block in the rows' own format or the other."""
BLOCK_ROWS = (16, 32, 64, 128)
"""Rows of one expert that a block may hold."""
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """One thread block's piece of a product, and how it is run."""

    tokens: int
    """Rows of one expert; both products of an expert have the same, that of the block map."""
    features: int
    """Output channels; a gated product computes as many of the gate and of the up matrix."""
    depth: int
    """Terms of each sum that are loaded at a time."""
    num_warps: int
    num_stages: int
    """Loads in flight, one behind the other."""
    group: int = 8
    """Blocks of tokens that walk over the features together, so that weights stay in L2."""

    def __str__(self) -> str:
        return f"{self.features}x{self.tokens}x{self.depth}"


@dataclass(frozen=True, slots=True)
class TileChoice:
    """The tiles of an expert's two products, and why."""

    gate_up: Tile
    down: Tile
    reason: str

    def __post_init__(self) -> None:
        if self.gate_up.tokens != self.down.tokens:
            raise KernelError(
                f"gate_up takes {self.gate_up.tokens} rows a block and down {self.down.tokens}, "
                f"but both read one block map; give them the same."
            )


def choose_tiles(
    scheme: str,
    dtype: str,
    rows_per_expert: float,
    *,
    device: str | None = None,
    shared_limit_bytes: int | None = None,
) -> TileChoice:
    """Choose tiles by how many rows an expert has on average.

    Args:
        scheme: one of `SCHEMES`.
        dtype: of the rows, one of `DTYPES`.
        rows_per_expert: N over the experts in use, known to the host; the true counts are not.
        device: name of the GPU, to look for tuned tiles.
        shared_limit_bytes: shared memory of a thread block there; without it, that of sm_90.

    Raises:
        KernelError: scheme or dtype is unknown, the tuned file is damaged, or no tile fits.
    """
    if scheme not in SCHEMES:
        raise KernelError(f"scheme ({scheme!r}) must be one of {', '.join(SCHEMES)}.")
    if dtype not in DTYPES:
        raise KernelError(f"dtype ({dtype!r}) must be one of {', '.join(DTYPES)}.")
    rows = next((size for size in BLOCK_ROWS if size >= rows_per_expert), BLOCK_ROWS[-1])
    tuned = load_tuned(TUNED / f"{slug(device)}.json") if device else {}
    if found := tuned.get((scheme, dtype, rows)):
        return found
    why = f"default for up to {rows} rows an expert"
    if device:
        why += f"; no tuned tile for {device}"
    gate_up, down = default_tiles(scheme, dtype, rows)
    if shared_limit_bytes is not None:
        gate_up = fit(gate_up, scheme, dtype, True, shared_limit_bytes)
        down = fit(down, scheme, dtype, False, shared_limit_bytes)
    return TileChoice(gate_up, down, why)


def default_tiles(scheme: str, dtype: str, rows: int) -> tuple[Tile, Tile]:
    """Return the tiles of the gated and of the plain product for blocks of `rows` rows.

    Few rows: the weights are read once and rule the time, so tiles are narrow, to have many thread
    blocks, and deep, to have many bytes in flight. Many rows: tiles are as large as the registers
    hold without a spill, since each byte loaded then serves more products. fp32 has no tensor core
    that keeps its precision, so its tiles are those of plain multiply-adds.
    """
    one_byte = scheme in ("w8a8", "e4m3")
    if dtype == "float32" and not one_byte:
        warps = 4 if rows <= 64 else 8
        tile = Tile(tokens=rows, features=64, depth=32, num_warps=warps, num_stages=2)
        return tile, tile
    if rows <= 32:
        tile = Tile(tokens=rows, features=64, depth=128, num_warps=4, num_stages=4)
        return tile, tile
    depth = 128 if one_byte else 64
    down = Tile(tokens=rows, features=128, depth=depth, num_warps=8, num_stages=3)
    if rows == 128 and scheme != "native":
        # Two sums, of the gate and of the up matrix, and beside each a tile's part (e4m3), another
        # format's sum, or weights on their way from one byte to two.
        # e4m3 also takes half the depth, without which sm_100 spills.
        return replace(down, features=64, depth=64 if scheme == "e4m3" else depth), down
    return down, down


def fit(tile: Tile, scheme: str, dtype: str, gated: bool, shared_limit_bytes: int) -> Tile:
    """Take away loads in flight until they fit into the shared memory of one thread block.

    Raises:
        KernelError: not even two stages fit.
    """
    value = 4 if dtype == "float32" else 2
    of_weights = 1 if scheme in ("w8a8", "w8a16", "e4m3") else value
    of_rows = 1 if scheme in ("w8a8", "e4m3") else value
    matrices = 2 if gated else 1
    stage = tile.depth * (matrices * tile.features * of_weights + tile.tokens * of_rows)
    stages = min(tile.num_stages, shared_limit_bytes // stage)
    if stages < 2:
        raise KernelError(
            f"tile {tile} needs {2 * stage} bytes of shared memory but a thread block has "
            f"{shared_limit_bytes}; use smaller tiles."
        )
    return replace(tile, num_stages=stages)


def slug(device: str) -> str:
    """Return the file name of a device: ``NVIDIA H200`` is `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


@cache
def load_tuned(path: Path) -> Mapping[tuple[str, str, int], TileChoice]:
    """Read tuned tiles by (scheme, dtype, rows a block); empty when there is no file.

    Raises:
        KernelError: the file is not what `save_tuned` writes.
    """
    if not path.is_file():
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return dict(_entries(record))
    except (ValueError, KeyError, TypeError) as error:
        raise KernelError(
            f"{path.name} is not a file of tuned tiles ({error}); remove it or tune again."
        ) from None


def _entries(record: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str, int], TileChoice]]:
    for entry in record["tiles"]:
        gate_up, down = Tile(**entry["gate_up"]), Tile(**entry["down"])
        why = f"tuned on {record['device']}, {record['date']}"
        yield (entry["scheme"], entry["dtype"], gate_up.tokens), TileChoice(gate_up, down, why)


def save_tuned(
    path: Path, device: str, date: str, best: Mapping[tuple[str, str, int], tuple[Tile, Tile]]
) -> None:
    """Write the best tiles found, by (scheme, dtype, rows a block), for `load_tuned`."""
    tiles = [
        {"scheme": scheme, "dtype": dtype, "gate_up": asdict(gate_up), "down": asdict(down)}
        for (scheme, dtype, _), (gate_up, down) in sorted(best.items())
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"device": device, "date": date, "tiles": tiles}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    load_tuned.cache_clear()
