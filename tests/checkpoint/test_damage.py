"""Damaged folders are refused within five seconds, in one line that names the file and the reason.

Each damage is done twice: to a folder with a manifest, and, where it shows without one, to a folder
that has none. The controls at the end show that the undamaged folders load.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.checkpoint.load import assignments, read_config
from engine.checkpoint.manifest import write_manifest
from engine.errors import CheckpointError
from tests.checkpoint.folders import SHAPE, random_tensors, write_folder

pytestmark = pytest.mark.timeout(5)

INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00003.safetensors"
NUM_TENSORS = 39
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 123456789\n"


def load(folder: Path) -> int:
    """Load everything and return the number of tensors."""
    return sum(1 for _ in assignments(folder, read_config(folder)))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        load(folder)
    text = str(refused.value)
    assert "\n" not in text, "one line"
    assert refused.value.exit_code == 1
    return text


def remove_shard(folder: Path) -> None:
    (folder / SHARD).unlink()


def cut_one_byte(folder: Path) -> None:
    os.truncate(folder / SHARD, (folder / SHARD).stat().st_size - 1)


def append_one_byte(folder: Path) -> None:
    with (folder / SHARD).open("ab") as file:
        file.write(b"\0")


def empty_the_shard(folder: Path) -> None:
    os.truncate(folder / SHARD, 0)


def flip_last_byte(folder: Path) -> None:
    data = bytearray((folder / SHARD).read_bytes())
    data[-1] ^= 0x10
    (folder / SHARD).write_bytes(data)


def announce_a_huge_header(folder: Path) -> None:
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes((2**40).to_bytes(8, "little") + data[8:])


def announce_an_endless_header(folder: Path) -> None:
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(b"\xff" * 8 + data[8:])


def break_the_header(folder: Path) -> None:
    data = bytearray((folder / SHARD).read_bytes())
    data[8] = ord("[")
    (folder / SHARD).write_bytes(data)


def put_a_pointer(folder: Path) -> None:
    (folder / SHARD).write_text(POINTER)


def put_a_pointer_for_the_config(folder: Path) -> None:
    (folder / "config.json").write_text(POINTER)


def add_a_stray_shard(folder: Path) -> None:
    (folder / "extra.safetensors").write_bytes((folder / SHARD).read_bytes())


def add_a_stray_file(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"x")


def swap_two_shards(folder: Path) -> None:
    other = folder / SHARD.replace("00002", "00001")
    one, two = other.read_bytes(), (folder / SHARD).read_bytes()
    other.write_bytes(two)
    (folder / SHARD).write_bytes(one)


def change_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    content = json.loads((folder / INDEX).read_text())
    change(content["weight_map"])
    (folder / INDEX).write_text(json.dumps(content))


def index_forgets_a_tensor(folder: Path) -> None:
    change_index(folder, lambda where: where.pop("model.norm.weight"))


def index_invents_a_tensor(folder: Path) -> None:
    change_index(folder, lambda where: where.update({"model.old.weight": SHARD}))


def index_names_an_old_shard(folder: Path) -> None:
    change_index(folder, lambda where: where.update({"x": "model-00009-of-00009.safetensors"}))


def index_climbs_out(folder: Path) -> None:
    change_index(folder, lambda where: where.update({"x": "../x.safetensors"}))


def index_is_absolute(folder: Path) -> None:
    change_index(folder, lambda where: where.update({"x": str(folder / SHARD)}))


def index_holds_a_number(folder: Path) -> None:
    change_index(folder, lambda where: where.update({"x": 3}))  # type: ignore[dict-item]


def remove_index(folder: Path) -> None:
    (folder / INDEX).unlink()


def index_is_empty(folder: Path) -> None:
    (folder / INDEX).write_text("{}")


def link_out_of_the_folder(folder: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    (folder / SHARD).rename(outside)
    (folder / SHARD).symlink_to(outside)


def link_to_nothing(folder: Path) -> None:
    (folder / SHARD).unlink()
    (folder / SHARD).symlink_to(folder / "gone")


def put_a_folder(folder: Path) -> None:
    (folder / SHARD).unlink()
    (folder / SHARD).mkdir()


def put_a_pipe(folder: Path) -> None:
    (folder / SHARD).unlink()
    os.mkfifo(folder / SHARD)


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


# damage, file in the message, reason with a manifest, reason without one (None: cannot be seen)
DAMAGES = [
    (remove_shard, SHARD, "missing", "missing"),
    (cut_one_byte, SHARD, "bytes, its manifest says", "it may be damaged"),
    (append_one_byte, SHARD, "bytes, its manifest says", "it may be damaged"),
    (empty_the_shard, SHARD, "bytes, its manifest says", "cut short or not safetensors"),
    (flip_last_byte, SHARD, "SHA-256", None),
    (announce_a_huge_header, SHARD, "SHA-256", "cannot hold the header of 1099511627776 bytes"),
    (announce_an_endless_header, SHARD, "SHA-256", "cannot hold the header"),
    (break_the_header, SHARD, "SHA-256", "it may be damaged"),
    (put_a_pointer, SHARD, "Git LFS pointer", "Git LFS pointer"),
    (put_a_pointer_for_the_config, "config.json", "Git LFS pointer", "Git LFS pointer"),
    (add_a_stray_shard, "extra.safetensors", "not in the manifest", f"not in {INDEX}"),
    (add_a_stray_file, "pytorch_model.bin", "not in the manifest", None),
    (swap_two_shards, ".safetensors", "its manifest says", "the index is stale"),
    (
        index_forgets_a_tensor,
        INDEX,
        "its manifest says",
        "does not place there; the index is stale",
    ),
    (index_invents_a_tensor, INDEX, "its manifest says", "lacks the tensor model.old.weight"),
    (
        index_names_an_old_shard,
        "",
        "its manifest says",
        "00009-of-00009.safetensors: the file is mi",
    ),
    (index_climbs_out, "", "its manifest says", "'../x.safetensors' leads out of the model folder"),
    (index_is_absolute, "", "its manifest says", "leads out of the model folder"),
    (index_holds_a_number, "", "its manifest says", "the file name 3 leads out"),
    (remove_index, INDEX, "missing", "the index is missing although there are 3"),
    (index_is_empty, INDEX, "its manifest says", "'weight_map' must be an object"),
    (link_out_of_the_folder, SHARD, "link leads out", "link leads out"),
    (link_to_nothing, SHARD, "missing", "missing"),
    (put_a_folder, SHARD, "not a regular file", "not a regular file"),
    (put_a_pipe, SHARD, "not a regular file", "not a regular file"),
    (remove_config, "config.json", "missing", "missing"),
]
IDS = [damage.__name__ for damage, *_ in DAMAGES]


@pytest.mark.parametrize(("damage", "file", "reason", "_"), DAMAGES, ids=IDS)
def test_a_damaged_folder_with_a_manifest_is_refused(
    tmp_path: Path, damage: Callable[[Path], None], file: str, reason: str, _: str | None
) -> None:
    folder = write_folder(tmp_path / "model", random_tensors(SHAPE), shards=3)
    damage(folder)
    text = refusal(folder)
    assert file in text
    assert reason in text


@pytest.mark.parametrize(("damage", "file", "_", "reason"), DAMAGES, ids=IDS)
def test_a_damaged_folder_without_a_manifest_is_refused_where_it_shows(
    tmp_path: Path, damage: Callable[[Path], None], file: str, _: str, reason: str | None
) -> None:
    folder = write_folder(tmp_path / "model", random_tensors(SHAPE), shards=3, manifest=False)
    damage(folder)
    if reason is None:
        assert load(folder) == NUM_TENSORS, "why a manifest is shipped"
        return
    text = refusal(folder)
    assert file in text
    assert reason in text


@pytest.mark.parametrize("damage", [index_forgets_a_tensor, index_invents_a_tensor])
def test_a_stale_index_is_refused_though_the_manifest_vouches_for_it(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    folder = write_folder(tmp_path / "model", random_tensors(SHAPE), shards=3)
    damage(folder)
    write_manifest(folder)
    assert "the index is stale" in refusal(folder)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    assert "the model folder does not exist" in refusal(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    assert "the model folder is not a folder" in refusal(tmp_path / "file")
    assert "config.json: the file is missing" in refusal(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    assert "there is no safetensors file" in refusal(tmp_path)


def test_every_single_flipped_byte_of_a_file_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", random_tensors(SHAPE))
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for position in [*range(0, 64), *range(64, len(data), len(data) // 40), len(data) - 1]:
        changed = bytearray(data)
        changed[position] ^= 1
        path.write_bytes(changed)
        assert "model.safetensors" in refusal(folder)


def test_an_oversized_index_is_refused_unread(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", random_tensors(SHAPE), shards=3, manifest=False)
    os.truncate(folder / INDEX, 2**40)
    assert f"{INDEX}: {2**40} bytes are too many" in refusal(folder)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("manifest", [True, False])
def test_an_undamaged_folder_loads(tmp_path: Path, shards: int, manifest: bool) -> None:
    tensors = random_tensors(SHAPE)
    folder = write_folder(tmp_path / "model", tensors, shards=shards, manifest=manifest)
    assert load(folder) == len(tensors) == NUM_TENSORS


def test_a_link_that_stays_in_the_folder_is_followed(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", random_tensors(SHAPE), shards=3, manifest=False)
    (folder / SHARD).rename(folder / "shard.data")
    (folder / SHARD).symlink_to("shard.data")
    assert load(folder) == NUM_TENSORS
