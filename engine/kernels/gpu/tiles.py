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
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from engine.errors import KernelError

TUNED = Path(__file__).parent.parent / "tuned"
SCHEMES = ("native", "w8a8", "w8a16", "e4m3", "mixed_int8", "mixed_e4m3")
"""How experts are computed: in the rows' format, in int8 both, in int8 weights with native rows,
in e4m3 both, or block by block in the rows' format or the other."""
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
    scheme: str, dtype: str, rows_per_expert: float, *, device: str | None = None
) -> TileChoice:
    """Choose tiles by how many rows an expert has on average.

    Args:
        scheme: one of `SCHEMES`.
        dtype: of the rows, one of `DTYPES`.
        rows_per_expert: N over the experts in use, known to the host; the true counts are not.
        device: name of the GPU, to look for tuned tiles.

    Raises:
        KernelError: scheme or dtype is unknown, or the tuned file is damaged.
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
    return TileChoice(gate_up, down, why)


def default_tiles(scheme: str, dtype: str, rows: int) -> tuple[Tile, Tile]:
    """Return the tiles of the gated and of the plain product for blocks of `rows` rows.

    Few rows: the weights are read once and rule the time, so tiles are narrow, to have many thread
    blocks, and deep, to have many bytes in flight. Many rows: tiles are as large as the registers
    hold, since each byte loaded then serves more products. fp32 has no tensor core that keeps its
    precision, so its tiles are those of plain multiply-adds.
    """
    if dtype == "float32" and scheme in ("native", "w8a16", "mixed_int8", "mixed_e4m3"):
        features, warps = (64, 4) if rows <= 32 else (64, 8)
        tile = Tile(tokens=rows, features=features, depth=32, num_warps=warps, num_stages=2)
        return tile, tile
    one_byte = scheme in ("w8a8", "e4m3")
    if rows <= 32:
        tile = Tile(tokens=rows, features=64, depth=128, num_warps=4, num_stages=4)
        return tile, tile
    gated = Tile(
        tokens=rows,
        features=128,
        depth=128 if one_byte else 64,
        num_warps=8,
        num_stages=3,
    )
    return gated, gated


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
