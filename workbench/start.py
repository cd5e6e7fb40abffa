"""`workbench start`: an engine on mixed traffic, the live dashboard and JupyterLab beside it.

The engine runs in this process, on its main thread: one process fewer to lose, signals arrive
where the loop is, and killing this process ends the engine with it. Dashboard and JupyterLab are
children by command; they are started first, so that their imports run beside the engine's. However
this ends, the children end too (see `workbench.lifecycle`).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig, at_least
from engine.errors import ConfigError, MachineError
from engine.events import Tee
from engine.runtime.telemetry import Message, Telemetry
from workbench import paths
from workbench.actions import serve_actions
from workbench.dashboard import (
    dashboard_process,
    require_packages,
    tell_end,
    when_it_answers,
)
from workbench.desk import Desk
from workbench.lab import DEFAULT_PORT as DEFAULT_LAB_PORT
from workbench.lab import READY_S as LAB_READY_S
from workbench.lab import lab_process
from workbench.lesson_copies import Copies, own_copies
from workbench.lifecycle import Child, Ended, ending_signals, signals_held
from workbench.traffic import Traffic, corpus_prompts
from workbench.window import Window

if TYPE_CHECKING:
    from engine import Engine

DEFAULT_PORT = 5006
SHOWN_DEVICES = 4
"""Logical devices in one process unless told otherwise; with one there is nothing to see."""
RATES_EVERY_S = 60.0
_LOOK_EVERY_S = 0.5


def start(
    *,
    model: str = paths.DEFAULT_MODEL,
    port: int = DEFAULT_PORT,
    devices: int | None = None,
    ranks: int = 1,
    running: int = 8,
    threads: int | None = None,
    seconds: float | None = None,
    lab: bool = True,
    lab_port: int = DEFAULT_LAB_PORT,
    lessons: Path | None = None,
    as_json: bool = False,
) -> int:
    """Run engine, dashboard and JupyterLab until asked to end; return the exit code.

    Args:
        model: model folder, or the name of a bundled model.
        port: first port to try for the dashboard; the next free one is taken.
        devices: logical devices the experts are spread over; None takes 4 in one process, and with
            ranks each of them is one.
        ranks: processes they are spread over; 1 is this one.
        running: requests kept running.
        threads: threads of one product; None takes half of the cores, the rest is for watching.
        seconds: end by itself after so long.
        lab: also run JupyterLab; where it cannot run, that is said and the rest goes on.
        lab_port: first port to try for JupyterLab.
        lessons: folder of the person's own copies of the lessons; None takes a place of their own.
        as_json: print one JSON line with the addresses on stdout, and rates on stderr.

    Raises:
        ConfigError: an option has a value that is not allowed.
        CheckpointError: the model folder is missing or damaged.
        MachineError: a package is missing, or the dashboard did not start or has ended.
    """
    began = time.monotonic()
    require_packages()
    config = EngineConfig(
        model=paths.model_folder(model),
        num_devices=_devices(ranks) if devices is None else devices,
        num_ranks=ranks,
        num_threads=max(1, (os.cpu_count() or 2) // 2) if threads is None else threads,
    )
    _check(port, lab_port, running, seconds)
    say = _Speaker(as_json, lab)
    try:
        with ending_signals(), ExitStack() as stack:
            desk = stack.enter_context(closing(Desk()))
            telemetry = stack.enter_context(closing(Telemetry(on_control=desk.take)))
            child = stack.enter_context(dashboard_process(telemetry, port))
            beside, copies = _lab(stack, lessons, lab_port, say) if lab else (None, None)
            when_it_answers(
                child, lambda url: say.ready(url, child, lambda: _lab_url(beside), copies, began)
            )
            window = Window()
            engine = stack.enter_context(closing(_engine(config, telemetry, window)))
            traffic = Traffic(corpus_prompts(), running)
            serve_actions(desk, engine, traffic, telemetry, window)
            say.news(f"the engine runs, {time.monotonic() - began:.1f} s after the start")
            stack.callback(tell_end, telemetry)  # the first thing that is done when this ends
            _loop(engine, traffic, desk, telemetry, child, beside, say, seconds)
    except Ended as ended:
        with contextlib.suppress(Ended):
            say.note(f"{ended.name}: everything has ended")
    return 0


def _devices(ranks: int) -> int:
    """Return the logical devices where none are asked for."""
    return 1 if ranks > 1 else SHOWN_DEVICES


def _check(port: int, lab_port: int, running: int, seconds: float | None) -> None:
    at_least("running", running, 1)
    for name, value in (("port", port), ("lab_port", lab_port)):
        if not 1 <= value <= 65535:
            raise ConfigError(f"{name} ({value}) must lie between 1 and 65535.")
    if seconds is not None and not seconds > 0:
        raise ConfigError(f"seconds ({seconds:g}) must be above 0.")


def _lab(
    stack: ExitStack, lessons: Path | None, port: int, say: _Speaker
) -> tuple[Child | None, Copies | None]:
    """Start JupyterLab on the person's copies; None where it cannot run, with the reason said."""
    try:
        copies = own_copies(lessons)
        return stack.enter_context(lab_process(copies.folder, port=port)), copies
    except MachineError as lacking:
        say.note(f"JupyterLab is left out: {lacking}")
        return None, None


def _lab_url(beside: Child | None) -> str | None:
    """Wait for JupyterLab's address; None without it, or when it has ended."""
    with contextlib.suppress(MachineError):
        return str(beside.report(LAB_READY_S)["url"]) if beside else None
    return None


def _engine(config: EngineConfig, telemetry: Telemetry, window: Window) -> Engine:
    """Load the model; torch is imported here and not before."""
    with signals_held():
        from engine import Engine

    engine = Engine(config, sink=Tee((telemetry, window)))
    telemetry.show_prompts(engine.tokenizer.decode)
    return engine


def _loop(
    engine: Engine,
    traffic: Traffic,
    desk: Desk,
    telemetry: Telemetry,
    child: Child,
    beside: Child | None,
    say: _Speaker,
    seconds: float | None,
) -> None:
    """Step until the time is up, a signal raises `Ended`, or the dashboard has ended."""
    now = time.monotonic()
    end = now + seconds if seconds is not None else float("inf")
    look_at, rates_at = now, now + RATES_EVERY_S
    busy = True
    while now < end:
        desk.serve(0.0 if busy else 0.05)
        busy = traffic.step(engine)
        now = time.monotonic()
        if now >= look_at:
            look_at = now + _LOOK_EVERY_S
            if not child.alive():
                raise MachineError(child.epitaph())
            if beside is not None and not beside.alive():
                say.note(f"{beside.epitaph()} The rest goes on.")
                beside = None
        if now >= rates_at:
            rates_at = now + RATES_EVERY_S
            say.news(rates(telemetry.latest))


def rates(frame: Message | None) -> str:
    """Say in one line how fast the engine goes."""
    meta = frame.meta if frame else {}
    if not meta.get("step_p50_ms"):
        return "idle"
    readers = meta["looking"]["viewers"]
    return (
        f"{meta['generated_per_s']:,.0f} tokens/s, {meta['num_running']} running, "
        f"step {meta['step_p50_ms']:.1f} ms (median), "
        f"routing overhead {meta['overhead_share']:.1%}, "
        f"watched by {readers} program{'' if readers == 1 else 's'}"
    )


class _Speaker:
    """Says what happens; a terminal that has gone away ends the program like a signal."""

    def __init__(self, as_json: bool, lab: bool) -> None:
        """Say what is being started, JupyterLab with it or not."""
        self._as_json = as_json
        self._all_said = as_json
        """Whether the addresses stand there; until then no news comes between them."""
        if not as_json:
            parts = "the engine, the dashboard and JupyterLab" if lab else "engine and dashboard"
            self._print(f"Starting {parts}; Ctrl-C ends all of it.\n", sys.stdout)

    def ready(
        self,
        url: str,
        child: Child,
        lab_url: Callable[[], str | None],
        copies: Copies | None,
        began: float,
    ) -> None:
        """Print the addresses, once: as one line of JSON, or each as soon as it answers."""
        ready_s = round(time.monotonic() - began, 2)
        if self._as_json:
            report = {"url": url, "lab_url": lab_url(), "pid": os.getpid(),
                      "dashboard_pid": child.pid, "ready_s": ready_s,
                      "lessons": str(copies.folder) if copies else None}  # fmt: skip
            for sentence in copies.said if copies else ():
                self.note(sentence)
            self._print(json.dumps(report), sys.stdout)
            return
        self._print(f"  Dashboard   {url}", sys.stdout)
        if beside := lab_url():
            self._print(f"  JupyterLab  {beside}", sys.stdout)
        if beside and copies:
            self._print(f"  Lessons     {copies.place} (your own copies)", sys.stdout)
            for sentence in copies.said:
                self._print(f"              {sentence}", sys.stdout)
        self._print("", sys.stdout)
        self._all_said = True

    def news(self, text: str) -> None:
        """Print a line that nobody misses while the addresses are still coming."""
        if self._all_said:
            self.note(text)

    def note(self, text: str) -> None:
        """Print one line with the time."""
        stream = sys.stderr if self._as_json else sys.stdout
        self._print(f"{time.strftime('%H:%M:%S')}  {text}", stream)

    def _print(self, text: str, stream: Any) -> None:
        try:
            print(text, file=stream, flush=True)
        except OSError:
            if threading.current_thread() is threading.main_thread():
                raise Ended("the terminal has closed") from None
