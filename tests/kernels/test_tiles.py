"""Tiles are chosen by rows an expert, cut to the memory of the chip, and may have been tuned."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from engine.errors import KernelError
from engine.kernels.gpu import tiles


@pytest.mark.parametrize("scheme", tiles.SCHEMES)
@pytest.mark.parametrize("dtype", tiles.DTYPES)
def test_a_block_holds_the_average_experts_rows_up_to_the_largest(scheme, dtype):
    found = [
        tiles.choose_tiles(scheme, dtype, rows).down.tokens for rows in (0.5, 16, 17, 64, 65, 9999)
    ]
    assert found == [16, 16, 32, 64, 128, 128]


@pytest.mark.parametrize("scheme", tiles.SCHEMES)
@pytest.mark.parametrize("rows", tiles.BLOCK_ROWS)
@pytest.mark.parametrize(("limit_kib", "chip"), [(227, "sm_90"), (163, "sm_80"), (99, "sm_89")])
def test_every_default_tile_fits_the_chips_shared_memory(scheme, rows, limit_kib, chip):
    for dtype in tiles.DTYPES:
        choice = tiles.choose_tiles(scheme, dtype, rows, shared_limit_bytes=limit_kib * 1024)
        assert min(choice.gate_up.num_stages, choice.down.num_stages) >= 2
        if chip == "sm_90":
            plain = tiles.choose_tiles(scheme, dtype, rows)
            assert (choice.gate_up, choice.down) == (plain.gate_up, plain.down)


def test_a_tile_that_cannot_fit_is_refused():
    tile = tiles.Tile(tokens=128, features=256, depth=128, num_warps=8, num_stages=3)
    assert tiles.fit(tile, "native", "bfloat16", False, 227 * 1024).num_stages == 2
    with pytest.raises(KernelError, match=r"tile 256x128x128 needs \d+ bytes .* has 65536; use"):
        tiles.fit(tile, "native", "bfloat16", True, 65536)


def test_tuned_tiles_go_before_the_defaults_and_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(tiles, "TUNED", tmp_path)
    gate_up, down = tiles.default_tiles("native", "bfloat16", 16)
    best = replace(gate_up, num_stages=5), replace(down, depth=64)
    before = tiles.choose_tiles("native", "bfloat16", 3, device="NVIDIA H200")
    assert before.reason == "default for up to 16 rows an expert; no tuned tile for NVIDIA H200"
    path = tmp_path / "nvidia-h200.json"
    tiles.save_tuned(path, "NVIDIA H200", "2026-11-30", {("native", "bfloat16", 16): best})
    after = tiles.choose_tiles("native", "bfloat16", 3, device="NVIDIA H200")
    assert (after.gate_up, after.down) == best
    assert after.reason == "tuned on NVIDIA H200, 2026-11-30"
    other = tiles.choose_tiles("w8a8", "bfloat16", 3, device="NVIDIA H200")
    assert other.reason.endswith("no tuned tile for NVIDIA H200")


@pytest.mark.parametrize("text", ["", "[]", '{"tiles": 3}', '{"tiles": [{"scheme": "native"}]}'])
def test_a_damaged_file_is_named(tmp_path, text):
    path = tmp_path / "nvidia-h200.json"
    path.write_text(text)
    with pytest.raises(KernelError, match=r"nvidia-h200\.json is not a file of tuned tiles"):
        tiles.load_tuned(path)


def test_two_products_with_different_blocks_are_refused(tmp_path):
    small, large = (
        tiles.default_tiles("native", "bfloat16", 16)[0],
        tiles.default_tiles("native", "bfloat16", 64)[1],
    )
    with pytest.raises(KernelError, match="gate_up takes 16 rows a block and down 64"):
        tiles.TileChoice(small, large, "by hand")


def test_unknown_names_are_refused():
    with pytest.raises(KernelError, match=r"scheme \('int4'\) must be one of native"):
        tiles.choose_tiles("int4", "bfloat16", 1)
    with pytest.raises(KernelError, match=r"dtype \('bf16'\) must be one of float32"):
        tiles.choose_tiles("native", "bf16", 1)


def test_the_files_in_the_tree_can_be_read():
    for path in tiles.TUNED.glob("*.json"):
        assert tiles.load_tuned(path), path.name
        assert json.loads(path.read_text())["device"]
