"""A drill's start tells its stages and can be ended at any; its state says when it sampled."""

from __future__ import annotations

import pytest

from engine.errors import MachineError
from workbench import drills
from workbench.drills.session import SAMPLE_EVERY_S
from workbench.drills.store import Store


def test_the_state_says_when_its_signals_were_sampled(make_session):
    now = [0.0]
    session = make_session("hot-expert", clock=lambda: now[0])
    session.snapshot()
    session.break_it()
    assert session.state()["sampled_s"] is None
    while not session.state()["signals"]:
        now[0] += SAMPLE_EVERY_S
        session.step()
    at_s = now[0]
    now[0] += SAMPLE_EVERY_S / 2
    session.step()
    state = session.state()
    assert state["sampled_s"] == at_s < state["elapsed_s"], "an old sample is not called new"


@pytest.mark.slow
@pytest.mark.parametrize("at", ["engine", "traffic"])
def test_a_start_that_is_broken_off_leaves_nothing(tmp_path, at):
    def stop(stage: str, done: int, of: int) -> None:
        if stage == at:
            raise MachineError("enough.")

    with pytest.raises(MachineError, match="enough"):
        drills.start("hot-expert", state=tmp_path, on_stage=stop)
    store = Store.at(tmp_path)
    assert not store.busy and store.current() is None
