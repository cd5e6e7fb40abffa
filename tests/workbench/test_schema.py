"""Files that people write: what is wrong with one is said with its place and the nearest word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import ConfigError
from workbench.schema import call_faults, named, read_yaml, schema_faults

RULES = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"title": {"type": "string"}, "minutes": {"type": "number", "minimum": 1}},
}


def ban(hands: object, expert: int, layer: int | None = None) -> None: ...


KNOWN = {"ban": ban}


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(RULES), encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"title": "A", "minutes": 3}, []),
        ({"tilte": "A"}, ["the file: unknown key 'tilte'; did you mean 'title'?"]),
        ({3: "A"}, ["the file: unknown key '3'."]),
        ({"minutes": 0}, ["minutes: 0 is less than the minimum of 1."]),
        ([], ["the file: [] is not of type 'object'."]),
    ],
)
def test_what_breaks_a_schema_is_one_sentence_each(rules, raw, said):
    assert list(schema_faults(raw, rules)) == said


@pytest.mark.parametrize(
    ("name", "arguments", "given", "said"),
    [
        ("ban", {"expert": 1, "layer": 2}, 1, ""),
        ("ban", {"layer": 2}, 2, ""),
        ("bann", {}, 1, "unknown act 'bann'; did you mean 'ban'? known: ban."),
        ("ban", {"expret": 1}, 1, "act ban: unknown argument 'expret'; did you mean 'expert'?"),
        ("ban", {"hands": 1, "expert": 1}, 1, "act ban: unknown argument 'hands'."),
        ("ban", {}, 1, "act ban: missing a required argument: 'expert'."),
    ],
)
def test_what_is_wrong_with_a_call_is_one_sentence(name, arguments, given, said):
    faults = list(call_faults("act", name, arguments, KNOWN, given))
    assert faults == ([said] if said else [])


def test_a_file_is_found_by_its_name_or_the_nearest_is_told(tmp_path: Path):
    (tmp_path / "hot.yaml").write_text("title: A", encoding="utf-8")
    assert read_yaml(named("drill", "hot", tmp_path)) == {"title": "A"}
    with pytest.raises(ConfigError, match=r"unknown drill 'hto'; did you mean 'hot'\? known dr"):
        named("drill", "hto", tmp_path)


@pytest.mark.parametrize("text", [b"a: [", b"\xff\xfe\x00", None])
def test_a_file_that_cannot_be_read_is_one_sentence_with_its_name(tmp_path: Path, text):
    file = tmp_path / "a.yaml"
    if text is not None:
        file.write_bytes(text)
    with pytest.raises(ConfigError, match=r"^a\.yaml cannot be read: "):
        read_yaml(file)
