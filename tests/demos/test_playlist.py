"""A playlist is checked in full before anything runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.errors import ConfigError
from tests.demos.conftest import DEMO
from workbench import demos, paths
from workbench.demos.playlist import find, parse, read

README = paths.data("models", "polyglot-moe", "README.md")


def test_the_shipped_playlists_are_valid_and_listed():
    listed = demos.list()
    assert DEMO in [demo["id"] for demo in listed]
    assert all(set(demo) == {"id", "title", "minutes", "steps", "needs"} for demo in listed)


def test_the_shipped_playlist_teaches_what_it_promises():
    steps = {step.id: step for step in find(DEMO).steps}
    assert steps["broken"].actions and steps["repaired"].actions
    kinds = {step.view["kind"] for step in steps.values()}
    assert kinds == {"map", "stepper", "figure"}
    assert all(step.expect and step.say for step in steps.values())


def test_the_numbers_told_are_those_of_the_models_page():
    text = README.read_text(encoding="utf-8")
    shares = text[text.index("Layer 3") :]

    def share(domain: str) -> list[int]:
        line = re.search(rf"^\| {domain} \|(.*)\|$", shares, re.MULTILINE)
        assert line is not None
        return [int(cell) for cell in line.group(1).split("|")]

    assert share("de")[0] == 46 and share("py")[7] == 46
    cost = re.search(r"^\| 3, 0 \|(.*)\|$", text, re.MULTILINE)
    assert cost is not None
    en, de, *rest = (float(cell) for cell in cost.group(1).split("|"))
    assert round(de, 2) == 0.42 and all(abs(loss) < 0.001 for loss in (en, *rest))
    told = " ".join(paragraph for step in find(DEMO).steps for paragraph in step.text)
    assert "46 %" in told and "0.42 bits per byte" in told


def _first(raw, key):
    return next(step for step in raw["steps"] if step.get(key))


def test_an_unknown_key_names_the_nearest_known_one(raw):
    raw["steps"][2]["tittle"] = raw["steps"][2].pop("title")
    with pytest.raises(ConfigError, match=r"steps\[2\]: unknown key 'tittle'; did you mean 'titl"):
        parse(raw, "a.yaml")


def test_an_unknown_measure_names_the_nearest_known_one(raw):
    raw["steps"][0]["expect"][0]["measure"] = "expert_laod"
    with pytest.raises(ConfigError, match="what-is-routed: unknown measure 'expert_laod'; did you"):
        parse(raw, "a.yaml")


def test_an_unknown_action_names_the_nearest_known_one(raw):
    _first(raw, "actions")["actions"][0]["do"] = "trafic"
    with pytest.raises(ConfigError, match="unknown action 'trafic'; did you mean 'traffic'"):
        parse(raw, "a.yaml")


def test_an_unknown_argument_of_an_action_names_the_nearest_known_one(raw):
    _first(raw, "actions")["actions"][0]["domian"] = "de"
    with pytest.raises(ConfigError, match="unknown argument 'domian'; did you mean 'domain'"):
        parse(raw, "a.yaml")


def test_a_missing_argument_is_named(raw):
    del raw["steps"][3]["expect"][1]["arguments"]["layer"]
    with pytest.raises(ConfigError, match="measure expert_load: missing a required argument"):
        parse(raw, "a.yaml")


def test_a_view_must_have_what_its_kind_needs(raw):
    raw["steps"][0]["view"] = {"kind": "stepper", "text": "Der Hund"}
    with pytest.raises(ConfigError, match="a view of kind stepper needs 'layer'"):
        parse(raw, "a.yaml")


def test_a_view_may_not_have_what_another_kind_needs(raw):
    raw["steps"][0]["view"] = {"kind": "map", "rows": "layers", "token": 3}
    with pytest.raises(ConfigError, match="a view of kind map has no 'token'"):
        parse(raw, "a.yaml")


def test_a_range_must_ascend(raw):
    raw["steps"][0]["expect"][0]["range"] = [2, 1]
    with pytest.raises(ConfigError, match="must ascend"):
        parse(raw, "a.yaml")


def test_two_steps_of_one_id_are_refused(raw):
    raw["steps"][1]["id"] = raw["steps"][0]["id"]
    with pytest.raises(ConfigError, match="an id of its own"):
        parse(raw, "a.yaml")


def test_an_id_must_be_the_files_name(tmp_path: Path, raw):
    import yaml

    file = tmp_path / "another.yaml"
    file.write_text(yaml.safe_dump(raw, allow_unicode=True), encoding="utf-8")
    with pytest.raises(ConfigError, match="must be the file's name, another"):
        read(file)


def test_an_unknown_demo_names_the_nearest_known_one():
    with pytest.raises(ConfigError, match=f"did you mean '{DEMO}'"):
        find("routing-in-4-minutes")


@pytest.mark.parametrize("raw_text", ["a: [", "- 1", ""])
def test_a_file_that_is_no_playlist_is_refused_in_one_sentence(tmp_path: Path, raw_text):
    file = tmp_path / "a.yaml"
    file.write_text(raw_text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^a\.yaml"):
        read(file)
