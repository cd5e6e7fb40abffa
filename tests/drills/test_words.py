"""What a drill says in a terminal: every outcome with its sign and its word."""

from __future__ import annotations

import re

import pytest

from workbench.drills.checks import Verdict, grade
from workbench.drills.course import on_one_line
from workbench.drills.files import find
from workbench.drills.words import (
    MARKS,
    briefing_text,
    clue_text,
    debrief_text,
    number,
    observation_text,
    proof_text,
    result_text,
    signals_line,
    told_lines,
    verdicts_text,
)

VERDICT = {
    "name": "devices alike",
    "outcome": "fail",
    "value": 2.54321,
    "steady": 1.25,
    "low": 0.0,
    "high": 1.5,
    "message": "One device still has most rows.",
}
PROOF = {
    "restored": False,
    "hashes": {
        "weights": {"before": "a" * 64, "after": "a" * 64, "equal": True},
        "policy": {"before": "b" * 64, "after": "c" * 64, "equal": False},
    },
}
RESULT = {
    "drill": "hot-expert",
    "reason": "finished",
    "grade": {
        "passed": False,
        "points": 40,
        "possible": 100,
        "parts": {"cause": {"earned": 40, "possible": 40}, "repair": {"earned": 0, "possible": 60}},
    },
    "solution": "An expert was favoured.",
    "elapsed_s": 12.0,
    "clues": 1,
    "proof": PROOF,
}


def test_a_verdict_shows_value_and_limits_and_its_message_below():
    assert verdicts_text([VERDICT]).splitlines() == [
        "✗ fail          devices alike: 2.54 (right: 0 to 1.5, before 1.25)",
        "    One device still has most rows.",
    ]


def test_a_verdict_without_numbers_leaves_them_out():
    open_ = VERDICT | {"outcome": "could not run", "value": None, "steady": None, "low": None}
    first = verdicts_text([open_]).splitlines()[0]
    assert first == "? could not run devices alike: "
    assert verdicts_text([VERDICT | {"message": ""}]).count("\n") == 0
    assert set(MARKS) == {"pass", "fail", "could not run"} and len(set(MARKS.values())) == 3


def test_a_result_shows_each_part_their_sum_the_solution_and_the_proof():
    lines = result_text(RESULT).splitlines()
    assert lines[:4] == [
        "hot-expert: finished after 12 s, 1 clue",
        "  cause                 40 of 40",
        "  repair                 0 of 60",
        "  together              40 of 100: not passed",
    ]
    assert "An expert was favoured." in lines and "NOT restored" in result_text(RESULT)
    passed = RESULT | {"grade": RESULT["grade"] | {"passed": True, "points": 100}}
    assert "100 of 100: passed" in result_text(passed)


def test_a_result_names_the_cause_beside_the_right_one_and_lists_the_last_checks():
    options = {"hot-expert": "An expert is hot.", "torn-table": "The table is torn."}
    more = {"options": options, "cause": "hot-expert", "checks": {"devices": VERDICT}}
    text = result_text(RESULT | more | {"diagnosis": "torn-table"})
    assert "✗ You named: The table is torn.\n  The cause:  An expert is hot.\n" in text
    assert "✗ fail          devices alike: 2.54" in text
    right = result_text(RESULT | more | {"diagnosis": "hot-expert"})
    assert "✓ You named: An expert is hot.\n\n" in right and "The cause:" not in right
    assert "No cause was named.\n  The cause:  An expert" in result_text(
        RESULT | more | {"diagnosis": None}
    )


def test_points_that_count_only_once_repaired_say_so():
    scenario = find("hot-expert")
    found = {
        check.id: Verdict(**VERDICT | {"outcome": "pass", "unit": "", "formula": ""})
        for check in scenario.checks
    }
    whole = grade(scenario, scenario.cause, found, acts=1)
    assert whole["passed"] and all("remark" not in part for part in whole["parts"].values())
    nothing_done = grade(scenario, scenario.cause, found, acts=0)
    text = result_text(RESULT | {"grade": nothing_done})
    assert re.search(r"nothing else broken +0 of \d+ \(counts only once repaired\)\n", text)


def test_numbers_have_their_unit():
    assert number(0.479, "share") == "47.9 %" and number(1.0, "share") == "100 %"
    assert number(1.923, "ratio") == "1.92 ×" and number(4093.0, "count") == "4,093"
    assert number(12.34, "ms") == "12.3 ms" and number(0.5, "s") == "0.5 s"
    shown = VERDICT | {"unit": "share", "value": 0.479, "steady": 0.99, "low": 0.97, "high": 1.0}
    assert "47.9 % (right: 97 % to 100 %, before 99 %)" in verdicts_text([shown])
    exact = VERDICT | {"unit": "count", "low": 0.0, "high": 0.0, "value": 4093.0}
    assert "4,093 (right: 0, before" in verdicts_text([exact])
    called = {"busiest_device rows=1200": {"name": "load of the busiest device", "unit": "ratio"}}
    line = signals_line({"called": called, "signals": {"busiest_device rows=1200": 1.923}})
    assert line == "load of the busiest device 1.92 ×"


def test_a_clue_asked_for_after_the_last_is_called_so():
    clue = {"number": 3, "of": 3, "again": False, "clue": "Look."}
    assert clue_text(clue) == "3 of 3: Look."
    assert clue_text(clue | {"again": True}) == (
        "There are no more clues than these 3; the last was: Look."
    )


def test_an_ungraded_result_keeps_the_solution_to_itself():
    text = result_text(RESULT | {"grade": None})
    assert "together" not in text and RESULT["solution"] not in text


def test_a_proof_shows_both_hashes_and_whether_they_are_equal():
    _, weights, policy = proof_text(PROOF).splitlines()
    assert f"{'a' * 16} = after {'a' * 16}" in weights
    assert f"{'b' * 16} ≠ after {'c' * 16}" in policy
    assert proof_text(PROOF | {"restored": True}).startswith("The engine is restored:")


@pytest.mark.parametrize("drill", ["hot-expert", "routing-jitter"])
def test_a_briefing_holds_every_option(drill):
    briefing = find(drill).briefing
    text = briefing_text(briefing)
    for option, meaning in briefing["options"].items():
        assert any(option in line and meaning in line for line in text.splitlines())
    assert briefing["description"] in text and find(drill).solution not in text


def test_an_observation_shows_load_by_device_and_expert_and_both_hashes():
    table = {"version": 3, "sha256": "d" * 64, "planned": {"version": 2, "sha256": "e" * 64}}
    seen = {
        "signals": [VERDICT],
        "rows": 1234,
        "device_rows": [[7, 8], [9, 10]],
        "expert_counts": [[1, 2, 3], [4, 5, 6]],
        "table": table,
        "policy": {"banned": [(0, 1)]},
    }
    text = observation_text(seen)
    assert "\n1,234 token rows measured since the last act\nrows by layer and device\n" in text
    more = observation_text(seen | {"most_rows": 4096})
    assert "since the last act, the newest 4,096 at most\n" in more
    assert "  layer 1:     9     10" in text and "  layer 0:     1      2      3" in text
    assert f"version 3, hash with its version {'d' * 12}\n" in text
    assert f"version 2, hash with its version {'e' * 12}\n" in text
    assert text.endswith("policy   banned [(0, 1)]")
    still = observation_text(seen | {"rows": 0, "device_rows": []})
    assert "no token row has run since the last act\ntable " in still
    unset = {"banned": [], "smoothing": 0.0, "capacity_factor": None}
    assert observation_text(seen | {"policy": unset}).endswith("policy   nothing set")


def test_a_debrief_says_who_did_what_and_how_long_it_took():
    journal = {
        "briefing": {"title": "One device works"},
        "events": [
            {"at_s": -3.0, "what": "steady"},
            {"at_s": 4.0, "what": "remark", "said": "layer 2?", "who": "ann"},
            {"at_s": 5.0, "what": "diagnosis", "option": "hot-expert", "who": "ben"},
            {"at_s": 8.0, "what": "act", "said": "published", "who": "ann"},
            {"at_s": 8.5, "what": "check", "outcomes": {"a": "pass", "b": "fail"}},
            {"at_s": 8.6, "what": "clue", "number": 2},
            {"at_s": 9.0, "what": "check", "outcomes": {"a": "pass"}},
        ],
    }
    text = debrief_text(journal)
    assert "4.0 s  ann: remark layer 2?" in text and "5.0 s  ben: diagnosis hot-expert" in text
    assert "check 1 of 2 pass (b: fail)\n" in text and "check 1 of 1 pass\n" in text
    assert "8.6 s  clue 2\n" in text
    assert "steady" not in text and "took part              ann, ben" in text
    assert "first change           after 8 s" in text and "checks passed          after 9 s" in text
    assert "first change           never" in debrief_text(journal | {"events": []})


def test_an_incident_does_not_say_what_it_is():
    briefing = find("hot-expert").briefing | {"title": "Incident of level 1", "surprise": True}
    assert "hot-expert," not in briefing_text(briefing) and "(15 min)" in briefing_text(briefing)


def test_an_observation_tells_of_deployment_and_changes():
    facts = {
        "running": False, "instances": [{"max_running": "4"}], "ranks": {"0": True, "1": False},
        "jobs": [{"name": "j", "does": "audits", "running": True, "last_run_s": 3.0}],
        "starts": [{"said": "the engine did not start: why"}],
    }  # fmt: skip
    seen = {
        "signals": [], "rows": 0, "device_rows": [], "expert_counts": [], "table": None,
        "policy": {}, "deployment": facts, "changes": ["table version 3 was given up: late"],
        "files": {"strange": ["precision.json"], "unit_rows": 1},
    }  # fmt: skip
    text = observation_text(seen)
    for line in (
        "engine   does not run", "options  max_running 4", "rank 1   is missing",
        "job      j (audits) runs, last did so 3 s ago", "log      the engine did not start: why",
        "change   table version 3 was given up: late",
        "files    not as published: precision.json", "files    precision.json: unit_rows 1",
    ):  # fmt: skip
        assert line in text, line
    pace = {
        "deployment": facts | {"running": True}, "step_ms": 8.04,
        "engine": {"num_waiting": 0, "num_free_blocks": 1000},
        "requests": {"tokens_a_second": 431.2, "rerun_rows": {"precision": 20, "recovery": 4}},
    }  # fmt: skip
    assert (
        "engine   runs: 431 tokens/s, 8.0 ms a step, 24 rows run again, 0 requests wait, "
        "1,000 blocks free\n" in observation_text(seen | pace)
    )


def test_what_others_did_and_said_is_told_in_its_order_by_name():
    diary = [{"at_s": 8.2, "who": "ann", "said": "published"}]
    remarks = [{"at_s": 4.0, "who": "", "said": "hm"}, {"at_s": 9.0, "who": "ben", "said": "yes"}]
    lines = list(told_lines({"diary": diary, "remarks": remarks}))
    assert lines == ["     4 s  hm", "     8 s  ann: published", "     9 s  ben: yes"]
    many = [{"at_s": float(n), "who": "", "said": str(n)} for n in range(20)]
    assert [line.split()[-1] for line in told_lines({"diary": many, "remarks": []})] == [
        str(n) for n in range(12, 20)
    ]


def test_a_remark_cannot_move_the_cursor_of_who_reads_it():
    assert on_one_line("  a\x1b[31mred\x07\r\nnew  line \u202e") == "a [31mred new line"
    assert on_one_line("\x1b\n\t") == "" and on_one_line("你好, über <b>") == "你好, über <b>"
