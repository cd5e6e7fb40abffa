"""`workbench model`, and what every command says about a damaged model folder."""

from __future__ import annotations

import json
import shutil
import time

import pytest

from workbench import paths

SOURCE = paths.model_folder(paths.DEFAULT_MODEL)
WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path):
    """A copy of the bundled model that a test may damage."""
    return shutil.copytree(SOURCE, tmp_path / "model")


def test_inspect_counts_parameters_total_and_active(workbench):
    report = workbench("model", "inspect", "--json").json
    config = report["config"]
    expert = 3 * config["hidden_size"] * config["moe_intermediate_size"]
    idle = config["num_experts"] - config["top_k"]
    assert (
        report["parameters"] - report["active_parameters"] == config["num_layers"] * idle * expert
    )
    assert len(report["tensors"]) == 134
    said = workbench("model", "inspect")
    assert said.code == 0 and "model.layers.*.mlp.experts.*.up_proj.weight  x 32" in said.out


def test_verify_proves_a_whole_folder(workbench, folder):
    report = workbench("model", "verify", folder, "--json").json
    assert report["status"] == "ok" and report["tensors"] == 134
    assert report["bytes"] >= (folder / WEIGHTS).stat().st_size
    assert workbench("model", "verify", folder).out.count("\n") == 1


def flip(folder):
    raw = bytearray((folder / WEIGHTS).read_bytes())
    raw[-1000] ^= 1
    (folder / WEIGHTS).write_bytes(raw)


def cut(folder):
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1])


def lose(folder):
    (folder / WEIGHTS).unlink()


def point(folder):
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


def wrong_config(folder):
    (folder / "config.json").write_text("{not json")


@pytest.mark.parametrize("damage", [flip, cut, lose, point, wrong_config])
@pytest.mark.parametrize(
    "words",
    [
        ("model", "verify", "FOLDER"),
        ("generate", "x", "--model", "FOLDER"),
        ("explain", "x", "--token", "0", "--layer", "0", "--model", "FOLDER"),
    ],
)
def test_a_damaged_folder_is_refused_within_five_seconds(workbench, folder, damage, words):
    damage(folder)
    began = time.monotonic()
    ended = workbench(*(folder if word == "FOLDER" else word for word in words))
    assert time.monotonic() - began < 5
    file = "config.json" if damage is wrong_config else WEIGHTS
    ended.assert_refused(1, file)


def test_an_unknown_folder_and_family_are_refused(workbench, folder):
    for command in ("inspect", "verify"):
        workbench("model", command, "no/such/folder").assert_refused(1, "no/such/folder")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama9"}))
    ended = workbench("model", "inspect", folder)
    assert ended.code in (1, 2) and "llama9" in ended.err and ended.err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ("model", "inspect", ""),
        ("model", "verify", ""),
        ("generate", "x", "--model", ""),
        ("explain", "x", "--token", "0", "--layer", "0", "--model", ""),
        ("trace", "record", "NEW", "--model", ""),
        ("start", "--no-lab", "--seconds", "1", "--model", ""),
        ("drill", "run", "hot-expert", "--state", "NEW", "--model", ""),
        ("drill", "run", "hot-expert", "--rehearse", "none", "--model", ""),
        ("bench", "startup", "--model", ""),
    ],
)
def test_an_empty_name_is_refused_wherever_a_model_is_named(workbench, tmp_path, words):
    ended = workbench(*(tmp_path / "new" if word == "NEW" else word for word in words))
    assert ended.code == 2 and ended.out == "", ended
    last = ended.err.splitlines()[-1]
    assert last.startswith("workbench: model ('') must be") and "polyglot-moe" in last
    assert not (tmp_path / "new").is_file()
