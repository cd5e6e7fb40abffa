"""Faults of ranks: killed, frozen, slowed down, late, with a slow link. Real where they can be.

What is set inside a rank's process travels there, so it is a function of this module.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from functools import partial
from typing import Any

from workbench.drills.injector import Target, action


@action
def kill_rank(target: Target) -> None:
    """End a rank's process with SIGKILL; which one is drawn by the seed."""
    os.kill(_pid(target), signal.SIGKILL)


@action
def freeze_rank(target: Target) -> None:
    """Stop a rank's process with SIGSTOP; which one is drawn by the seed."""
    os.kill(_pid(target), signal.SIGSTOP)


@action
def throttle_rank(target: Target, stopped_ms: float, running_ms: float) -> None:
    """Let a rank's process run for a part of the time only, by SIGSTOP and SIGCONT."""
    pid, over = _pid(target), threading.Event()
    until = time.monotonic() + target.lease_s

    def lives() -> bool:
        engine = target.deployment.engine
        return engine is not None and pid in engine.ranks.values()

    def throttle() -> None:
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < until and not over.is_set() and lives():
                os.kill(pid, signal.SIGSTOP)
                over.wait(stopped_ms / 1e3)
                os.kill(pid, signal.SIGCONT)
                over.wait(running_ms / 1e3)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=throttle, name="throttle", daemon=True)

    def heal() -> None:
        over.set()
        thread.join(2.0)

    target.deployment.undo_with(heal)
    thread.start()


@action
def slow_link(target: Target, every: int, sleep_ms: float) -> None:
    """Let one rank now and then send its rows late."""
    target.inject("dispatch.send", partial(_now_and_then, every, sleep_ms), _rank(target))


@action
def late_to_stage(target: Target, sleep_s: float) -> None:
    """Let one rank take long over gathering the experts of a new table."""
    target.inject("table.stage", partial(_late, sleep_s), _rank(target))


_calls = 0


def _now_and_then(every: int, sleep_ms: float, value: Any) -> Any:
    global _calls
    _calls += 1
    if _calls % every == 0:
        time.sleep(sleep_ms / 1e3)
    return value


def _late(sleep_s: float, value: Any) -> Any:
    time.sleep(sleep_s)
    return value


def _rank(target: Target) -> int:
    """Draw a rank; never the first, so that one stays whatever the seed."""
    ranks = sorted(target.deployment.require().ranks)
    return int(target.rng.choice(ranks[1:]))


def _pid(target: Target) -> int:
    return target.deployment.require().ranks[_rank(target)]
