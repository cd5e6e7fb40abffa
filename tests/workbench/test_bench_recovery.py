"""How lost ranks are summed up; that none costs a request is tested in tests/cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import ConfigError
from workbench.bench.recovery import Strike, report, run


def strike(recovery_s: float, same_output: bool = True) -> Strike:
    return Strike(
        rank=1,
        noticed_s=0.1,
        regroup_s=0.1,
        recovery_s=recovery_s,
        rows_again=3,
        same_output=same_output,
    )


def test_the_worst_recovery_is_held_against_the_bound():
    summed = report([strike(0.2), strike(0.5), strike(2.5)], 4, 8, "kill")
    assert summed["recovery_s"] == {"median": 0.5, "worst": 2.5}
    assert not summed["within_bound"] and summed["same_output"]
    frozen = report([strike(2.5)], 4, 8, "stop")
    assert frozen["within_bound"] and frozen["bound_s"] == 4.0


def test_one_request_with_another_output_is_not_averaged_away():
    assert not report([strike(0.2), strike(0.2, same_output=False)], 4, 8, "kill")["same_output"]


@pytest.mark.parametrize(
    "options", [{"ranks": 1}, {"times": 0}, {"requests": 0}, {"tokens": 3}, {"how": "sleep"}]
)
def test_what_cannot_be_struck_is_refused_before_a_rank_starts(options):
    with pytest.raises(ConfigError):
        run(Path("nowhere"), **options)
