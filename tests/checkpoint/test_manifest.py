from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.checkpoint.manifest import main, read_manifest, verify, write_manifest
from engine.errors import CheckpointError
from tests.checkpoint.folders import SHAPE, random_tensors, write_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", random_tensors(SHAPE))


def test_a_manifest_lists_size_and_hash_of_every_file_but_the_documentation(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    (folder / ".gitattributes").write_text("x")
    (folder / "sub").mkdir()
    write_manifest(folder)
    content = json.loads((folder / "manifest.json").read_text())
    assert content["format"] == 1
    assert sorted(content["files"]) == ["config.json", "model.safetensors", "tokenizer.json"]
    for name, entry in content["files"].items():
        data = (folder / name).read_bytes()
        assert entry == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_a_written_manifest_reads_back_and_verifies(folder: Path) -> None:
    written = write_manifest(folder)
    assert read_manifest(folder) == verify(folder) == written
    assert written.total_bytes == sum(
        (folder / name).stat().st_size for name in ("config.json", "model.safetensors")
    )


def test_writing_twice_gives_the_same_bytes_and_leaves_nothing_aside(folder: Path) -> None:
    first = (folder / "manifest.json").read_bytes()
    write_manifest(folder)
    assert (folder / "manifest.json").read_bytes() == first
    assert not list(folder.glob(".manifest*"))


def test_without_hashes_only_sizes_are_compared(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    verify(folder, hashes=False)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: its SHA-256 is not"):
        verify(folder)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"format": 2, "files": {}}', "format 2 is not known"),
        ('{"format": 1}', "'files' must be an object"),
        ('{"format": 1, "files": {}}', "'files' must be an object"),
        ("[]", "holds a list, not a JSON object"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("\udcff", "not valid JSON"),
        ('{"format": 1, "files": {"a": 3}}', "the entry of 'a'"),
        ('{"format": 1, "files": {"a": {"bytes": true, "sha256": "x"}}}', "the entry of 'a'"),
        ('{"format": 1, "files": {"a": {"bytes": 1, "sha256": "XYZ"}}}', "the entry of 'a'"),
        ('{"format": 1, "files": {"../a": {"bytes": 1, "sha256": ""}}}', "'../a' leads out"),
    ],
)
def test_a_broken_manifest_is_refused(folder: Path, content: str, reason: str) -> None:
    (folder / "manifest.json").write_text(content, errors="surrogateescape")
    with pytest.raises(CheckpointError) as refused:
        read_manifest(folder)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_empty_folder_cannot_be_listed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no file to list"):
        write_manifest(tmp_path)


def test_the_command_writes_checks_and_reports_damage(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "manifest.json").unlink()
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out.startswith("listed 2 files, ")
    assert main([str(folder), "--check"]) == 0
    assert capsys.readouterr().out.startswith("verified 2 files, ")
    (folder / "config.json").unlink()
    assert main([str(folder), "--check"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "config.json: the file is missing" in captured.err


def test_the_module_runs_as_a_program(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "engine.checkpoint.manifest", folder, "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("verified 2 files")
