"""Signals end a process cleanly, and wait where an exception would end it hard."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from workbench.lifecycle import Ended, ending_signals, signals_held


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_waits_while_it_is_held_and_ends_right_after(name):
    reached = []
    with pytest.raises(Ended, match=name.name), ending_signals():
        with signals_held():
            signal.raise_signal(name)
            reached.append("held")
        reached.append("after")
    assert reached == ["held"]


def test_a_signal_that_is_not_held_ends_at_once():
    reached = []
    with pytest.raises(Ended, match="SIGTERM"), ending_signals():
        signal.raise_signal(signal.SIGTERM)
        reached.append("after")
    assert reached == []


def test_a_signal_that_reaches_another_thread_waits_too():
    reached = []
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        with pytest.raises(Ended, match="SIGHUP"), ending_signals():
            with signals_held():
                signal.pthread_kill(other.ident, signal.SIGHUP)
                time.sleep(0.05)
                reached.append("held")
            reached.append("after")
    finally:
        done.set()
        other.join()
    assert reached == ["held"]
