"""Signals end a process cleanly, and wait where an exception would end it hard."""

from __future__ import annotations

import os
import signal

import pytest

from workbench.lifecycle import Ended, ending_signals, signals_held


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_waits_while_it_is_held_and_ends_right_after(name):
    reached = []
    with pytest.raises(Ended, match=name.name), ending_signals():
        with signals_held():
            os.kill(os.getpid(), name)
            reached.append("held")
        reached.append("after")
    assert reached == ["held"]


def test_a_signal_that_is_not_held_ends_at_once():
    reached = []
    with pytest.raises(Ended, match="SIGTERM"), ending_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        reached.append("after")
    assert reached == []
