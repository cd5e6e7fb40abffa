"""Each drill headless: steady, measurably broken, repaired wrongly and rightly, restored."""

from __future__ import annotations

import pytest

from engine.errors import ConfigError, RequestError, RoutingError
from engine.events import ControlEvent
from tests.drills.conftest import ALL, DRILLS
from workbench.drills.checks import FAIL, PASS, examine, grade
from workbench.drills.files import find
from workbench.drills.rehearsal import WRONG, healthy, rehearse, ways
from workbench.drills.scenario import REPAIR
from workbench.drills.stages import STAGES

WAYS = [(drill, way) for drill in ALL for way in ways(find(drill))]


def outcomes(session):
    return {name: check["outcome"] for name, check in session.check()["checks"].items()}


def marks(session, cause):
    return grade(session.scenario, cause, session.verdicts, len(session.acts))


@pytest.mark.parametrize("drill", DRILLS)
def test_a_drill_is_measurable_and_only_the_right_repair_passes(make_session, drill):
    session, told = make_session(drill), []
    scenario = session.scenario
    session.prepare(lambda *stage: told.append(stage))
    assert_told_in_order(told, len(session.steady))
    verdicts = examine(scenario.checks, session.readings(), session.steady)
    assert {v.outcome for v in verdicts.values()} == {PASS}, "a check fires on a healthy engine"

    session.break_it()
    seen = session.observe()["signals"]
    assert len(seen) >= 2 and {signal["outcome"] for signal in seen} == {FAIL}

    found = outcomes(session)
    symptoms = [check.id for check in scenario.checks if check.kind == REPAIR]
    assert {found[name] for name in symptoms} == {FAIL}
    unrepaired = marks(session, scenario.cause)
    assert not unrepaired["passed"] and unrepaired["points"] == scenario.diagnosis_points

    # The other false trails are walked by `make drills`.
    trail = scenario.false_trails[0]
    for act, arguments in trail.acts:
        session.act(act, **arguments)
    assert FAIL in outcomes(session).values(), trail.title
    assert not marks(session, scenario.cause)["passed"], trail.title
    if session.deployment.engine is not None:
        session.act("clear-policy")

    for act, arguments in scenario.repairs[0].acts:
        session.act(act, **arguments)
    wrong = next(option for option in scenario.options if option != scenario.cause)
    session.diagnose(wrong)
    session.diagnose(scenario.cause)
    result = session.finish()
    assert {verdict.outcome for verdict in session.verdicts.values()} == {PASS}, session.verdicts
    assert not marks(session, wrong)["passed"]
    assert result["grade"]["passed"] and result["grade"]["points"] == 100, result["grade"]
    assert result["proof"]["restored"]
    assert set(result["proof"]["hashes"]) >= {"weights", "table", "policy", "ranks", "options"}


def assert_told_in_order(told, num_measured):
    """Check that a start has told each stage, and how many of how many."""
    assert list(dict.fromkeys(stage for stage, _, _ in told)) == list(STAGES)[1:4]
    traffic = [(done, of) for stage, done, of in told if stage == "traffic"]
    assert traffic == sorted(traffic) and traffic[0][0] < traffic[-1][0] == traffic[-1][1] >= 800
    assert [stage for stage in told if stage[0] == "measuring"] == [
        ("measuring", done, num_measured) for done in range(num_measured)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("drill", "way"), WAYS)
def test_every_way_ends_as_it_must(make_session, drill, way):
    result = rehearse(make_session(drill), way)
    assert result["grade"]["passed"] == result["expected"], (result["grade"], result["checks"])
    assert result["proof"]["restored"] and len(result["symptom"]) >= 2
    found = {name: check["outcome"] for name, check in result["checks"].items()}
    if result["expected"] or way == WRONG:  # a wrong cause alone fails what is repaired
        assert set(found.values()) == {PASS}, result["checks"]
    else:  # and what fails was measured, not unreadable
        assert FAIL in found.values(), result["checks"]


@pytest.mark.slow
@pytest.mark.parametrize("drill", ALL)
def test_on_a_healthy_engine_no_check_and_no_signal_fires(make_session, drill):
    assert set(healthy(make_session(drill)).values()) == {PASS}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("drill", ALL)
def test_another_seed_still_grades_right(make_session, drill, seed):
    assert set(healthy(make_session(drill, seed=seed)).values()) == {PASS}
    assert rehearse(make_session(drill, seed=seed), "reference")["grade"]["passed"]
    assert not rehearse(make_session(drill, seed=seed), "none")["grade"]["passed"]


def test_the_time_limit_heals_what_the_fault_left_behind(make_session):
    now = [0.0]
    session = make_session("half-updated-table", minutes=1, clock=lambda: now[0])
    session.snapshot()
    session.break_it()
    assert session.step()
    now[0] += 61
    assert not session.step()
    assert session.phase == "ended" and session.result["reason"] == "the time is up"
    assert not session.result["grade"]["passed"]
    assert session.result["proof"]["restored"]


def test_finishing_and_restoring_twice_change_nothing(make_session):
    session = make_session("hot-expert")
    session.snapshot()
    session.break_it()
    session.act("smooth", bonus=1.0)
    first = session.finish("given up", graded=False)
    assert first["proof"]["restored"] and first["grade"] is None
    assert session.finish() is first
    assert session.restore()["restored"]
    for ask in (session.check, session.hint, lambda: session.act("publish")):
        with pytest.raises(RequestError, match="ended"):
            ask()


def test_a_change_that_was_not_undone_is_not_called_restored(make_session):
    session = make_session("hot-expert")
    session.snapshot()
    session.break_it()
    undo, session._undo = session._undo, []
    session.act("smooth", bonus=1.0)
    proof = session.restore()
    assert not proof["restored"] and not proof["hashes"]["policy"]["equal"]
    session._undo = undo
    assert session.restore()["restored"]


def test_the_undo_is_registered_before_the_fault(make_session):
    session = make_session("hot-expert")
    session.snapshot()
    session.break_it()
    order = [event["what"] for event in session.events]
    assert order[:3] == ["steady", "undo registered", "started"]


def test_a_learner_never_sees_what_was_broken(make_session, bench):
    session = make_session("hot-expert")
    session.snapshot()
    session.break_it()
    seen = str(session.observe()) + str(session.state()) + str(session.check())
    for word in ("gate.logits", "inject", "lease", session.scenario.solution[:20]):
        assert word not in seen
    kept = [n for n in bench.window.trace().controls if isinstance(n, ControlEvent)]
    assert not {note.action for note in kept} & {"inject", "clear"}


def test_more_runs_where_a_probe_has_seen_too_little(make_session, monkeypatch):
    session, asked = make_session("small-batches"), []
    monkeypatch.setattr(session._evidence, "gather", asked.append)
    session._gather()
    assert asked == [400, 800]
    monkeypatch.undo()
    session._evidence.gather(1000)
    monkeypatch.setattr(session._evidence, "gather", asked.append)
    session._gather()
    assert asked == [400, 800, 400]


def test_what_cannot_be_done_is_refused_with_a_reason(make_session):
    session = make_session("hot-expert")
    with pytest.raises(RequestError, match="not running"):
        session.check()
    session.snapshot()
    session.break_it()
    for act, arguments, words in [
        ("smoth", {}, "did you mean 'smooth'"),
        ("smooth", {}, "bonus"),
        ("smooth", {"bonus": "1"}, "must be of the kind float"),
        ("smooth", {"bonus": True}, "must be of the kind float"),
        ("move", {"layer": 0, "expert": 1.5, "device": 0}, "must be of the kind int"),
    ]:
        with pytest.raises(ConfigError, match=words):
            session.act(act, **arguments)
    for act, arguments in [
        ("smooth", {"bonus": -1.0}),
        ("replicate", {"layer": 9, "expert": 0}),
        ("move", {"layer": 0, "expert": 0, "device": 9}),
        ("force", {"experts": [0, 1, 2]}),
    ]:
        with pytest.raises(RoutingError):
            session.act(act, **arguments)
    with pytest.raises(ConfigError, match="must be one of"):
        session.diagnose("gremlins")
    assert session.acts == [] and session.diagnosis is None


@pytest.mark.slow
def test_copies_of_the_hot_expert_also_repair_and_moving_it_does_not(make_session):
    session = make_session("hot-expert")
    session.prepare()
    session.break_it()
    session.observe()
    session.act("move-busiest")
    found = outcomes(session)
    assert (found["devices"], found["placed"]) == (FAIL, PASS)
    session.act("replicate-busiest")
    devices, choice = session.observe()["signals"]
    assert devices["outcome"] == PASS and devices["message"] == ""
    assert choice["outcome"] == FAIL and "may stay high after a repair" in choice["message"]
    assert set(outcomes(session).values()) == {PASS}
