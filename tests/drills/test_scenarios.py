"""Drill files are refused with file, place and reason before anything runs."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import yaml

from engine.errors import ConfigError
from tests.drills.conftest import ALL
from workbench.drills.checks import key
from workbench.drills.files import filled_in, find, folder, parse, read, scenarios
from workbench.drills.scenario import REPAIR, Tolerance

SHIPPED = folder() / "hot-expert.yaml"
FAVOUR = {
    "type": "python",
    "module": "workbench.drills.injector",
    "func": "favour_expert",
    "arguments": {"bias": 1},
}


@pytest.fixture(scope="module")
def shipped():
    return yaml.safe_load(SHIPPED.read_text("utf-8"))


def test_the_shipped_drills_are_valid_and_sorted_by_level():
    found = scenarios()
    assert {scenario.id for scenario in found} == {path.stem for path in folder().glob("*.yaml")}
    assert [scenario.level for scenario in found] == sorted(scenario.level for scenario in found)


def test_what_a_file_is_held_against_loads_no_torch():
    code = "import sys; from workbench.drills import acts, acts_service, breaks, jobs, probes"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_file_is_read_again_once_it_was_written_again(tmp_path):
    path = tmp_path / "hot-expert.yaml"
    for number, title in enumerate(("Once upon a time", "Once again")):
        path.write_text(yaml.safe_dump(yaml.safe_load(SHIPPED.read_text()) | {"title": title}))
        os.utime(path, ns=(number, number))
        assert read(path).title == title and read(path) is read(path)


@pytest.mark.parametrize("drill", ALL)
def test_a_briefing_tells_the_symptom_and_not_the_cause(drill):
    scenario = find(drill)
    said = str(scenario.briefing)
    assert scenario.solution not in said and not any(clue in said for clue in scenario.clues)
    assert scenario.options[scenario.cause] not in scenario.description
    for call in scenario.method:
        assert call.name not in said, "what was broken is told"


@pytest.mark.parametrize("drill", ALL)
def test_a_drill_shows_in_two_signals_and_its_ways_differ(drill):
    scenario = find(drill)
    assert len({key(probe) for probe in scenario.signals}) == len(scenario.signals) >= 2
    ways = [str(way.acts) for way in (*scenario.repairs, *scenario.false_trails)]
    assert len(set(ways)) == len(ways) and scenario.false_trails
    measured = {key(check.probe) for check in scenario.checks if check.kind == REPAIR}
    assert measured & {key(probe) for probe in scenario.signals}, "no check asks for a signal"


def change(raw, path, value):
    raw = copy.deepcopy(raw)
    *parents, last = path
    place = raw
    for step in parents:
        place = place[step]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return raw


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("rollback",), [], "unknown key 'rollback'; did you mean 'rollbacks'"),
        (("checks", 0, "point"), 3, "checks[0]: unknown key 'point'; did you mean 'points'"),
        (("clues",), ["only one"], "clues"),
        (("seed",), None, "'seed' is a required property"),
        (("level",), 4, "level: 4 is not one of"),
        (("minutes",), 0, "minutes"),
        (("method", 0, "provider", "module"), "os", "method[0].provider.module"),
        (("method", 0, "provider", "func"), "favor_expert", "did you mean 'favour_expert'"),
        (("method", 0, "provider", "arguments"), {"bais": 4.0}, "did you mean 'bias'"),
        (("checks", 0, "probe", "provider", "func"), "system", "unknown probe 'system'"),
        (("checks", 0, "probe", "tolerance", "range"), [2, 1], "must ascend"),
        (("checks", 0, "points"), 41, "must sum to 100"),
        (("checks", 1, "id"), "devices", "id of its own"),
        (("solution", "cause"), "magic", "must be one of the diagnosis options"),
        (("solution", "repairs", 0, "acts", 0, "act"), "rebalanse", "did you mean 'rebalance'"),
        (("rollbacks", 0, "use"), "restroe", "unknown part 'restroe'; did you mean 'restore'"),
        (("rollbacks", 0), {"use": "restore", "provider": FAVOUR}, "rollbacks must call restore"),
        (("needs", "ranks"), 2, "needs"),
        (("deployed",), {"jobs": [{"kind": "rebalancr", "name": "r"}]}, "mean 'rebalancer'"),
        (("id",), "other", "must be the file's name"),
    ],
)
def test_a_file_that_breaks_a_rule_is_refused_with_its_place(shipped, path, value, words):
    with pytest.raises(ConfigError) as refused:
        parse(change(shipped, path, value), "hot-expert.yaml", drill="hot-expert")
    assert words in str(refused.value) and str(refused.value).startswith("hot-expert.yaml: ")


def test_what_is_no_mapping_is_refused():
    for raw in (None, [], "text"):
        with pytest.raises(ConfigError, match="is not of type 'object'"):
            parse(raw, "empty.yaml")


def test_an_unknown_drill_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match="did you mean 'hot-expert'"):
        find("hot-experts")


def test_a_relative_tolerance_is_in_multiples_of_the_value_before():
    assert Tolerance("relative", 0.5, 1.1).limits(0.6) == (0.3, pytest.approx(0.66))
    assert Tolerance("range", 1, 2).limits(None) == (1, 2)
    with pytest.raises(ConfigError, match="not measured"):
        Tolerance("relative", 0, 1).limits(None)


def test_a_part_is_taken_and_what_stands_beside_it_put_in_its_place():
    check = filled_in({"use": "check-answers", "points": 7, "tolerance": {"range": [0, 1]}}, "x")
    assert check["points"] == 7 and check["probe"]["tolerance"] == {"range": [0, 1]}
    assert check["probe"]["provider"]["func"] == "answers_kept" and "use" not in str(check)
    with pytest.raises(ConfigError, match="x: unknown part 'check-answer'; did you mean"):
        filled_in([{"use": "check-answer"}], "x")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("fault",), "gate.logits", "safe: unknown fault 'gate.logits'"),
        (("fault",), "slow-gat", "did you mean 'slow-gate'"),
        (("delay_ms",), 51, "delay_ms (51) must be above 0 and at most 50"),
        (("at",), "two ranks", "safe.at"),
        (("func",), "hold_lock", "safe: unknown key 'func'"),
        (("checks", 0, "probe", "provider", "func"), "stage_share", "unknown probe 'stage_share'"),
        (("solution", "repairs", 0, "acts", 0, "act"), "restart", "safe: unknown act 'restart'"),
        (("checks", 0, "points"), 26, "safe: the points of diagnosis and checks must sum to 100"),
    ],
)
def test_a_drill_is_marked_safe_only_with_a_delay_and_what_can_be_read_over_http(
    path, value, words
):
    raw = yaml.safe_load((folder() / "lock-contention.yaml").read_text("utf-8"))
    with pytest.raises(ConfigError) as refused:
        parse(change(raw, ("safe", *path), value), "lock-contention.yaml")
    assert words in str(refused.value)
    engines = change(raw, ("checks", 0, "probe", "provider", "func"), "service_step_ms")
    with pytest.raises(ConfigError, match="unknown probe 'service_step_ms'"):
        parse(engines, "lock-contention.yaml")
