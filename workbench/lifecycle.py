"""Child programs that never outlive us, and a clean end however we are asked for it.

A child is started by command, never forked, in a session of its own, so that Ctrl-C reaches the
parent alone, which then ends the child. Should the parent die without a word, the child notices by
itself: its standard input ends at once, and a look at the parent every half second is the sure way
where something else has inherited the other end of that pipe.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any

from engine.errors import ConfigError, MachineError

WATCH_S = 0.5
_GRACE_S = 2.0
_LOOK_EVERY_S = 0.5
_MAX_START_DRIFT_S = 2.0
"""Start times of one process read by two others differ by less; a new process with an old id is
never this close."""


class Ended(BaseException):
    """Somebody asked this process to end; `name` says how."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@contextlib.contextmanager
def ending_signals() -> Iterator[None]:
    """Within this, Ctrl-C, SIGTERM and a closed terminal raise `Ended`, once.

    Later signals are ignored, so that the clean-up is not cut short; it is bounded. What the
    process was told to ignore before, as by nohup, stays ignored.
    """
    before = {name: signal.getsignal(name) for name in _ending()}
    asked = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if not asked:
            asked = True
            raise Ended(signal.Signals(number).name)

    for name, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(name, on_signal)
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Let the signals of `ending_signals` wait until this is over.

    For imports that run through foreign code: an exception raised there would end the process at
    once, and hard. A mask would not do: it holds for one thread, and foreign code brings its own.
    On another thread than the main one nothing is raised anyway.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {name: signal.getsignal(name) for name in _ending()}
    for name, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(name, lambda number, _frame: came.append(number))
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
        if came:
            signal.raise_signal(came[0])


def _ending() -> list[signal.Signals]:
    """Return the signals by which somebody asks a process to end."""
    names = [signal.SIGINT, signal.SIGTERM]
    return names + ([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])


def own_identity() -> str:
    """Return PID:START_TIME of this process, which a child is told to end with."""
    import psutil

    return f"{os.getpid()}:{psutil.Process().create_time():.3f}"


def end_with_parent(
    identity: str, watch_stdin: bool, last: Callable[[], None] | None = None
) -> None:
    """End this process when the one called `identity` is gone; two threads see to it.

    Args:
        identity: PID:START_TIME of the parent.
        watch_stdin: whether the end of standard input is the parent's end too.
        last: called first, on one of the threads or on both; it must not take long.

    Raises:
        ConfigError: `identity` is not PID:START_TIME.
        MachineError: that process is gone already, or psutil is missing.
    """
    psutil = _psutil()
    number, _, started = identity.partition(":")
    try:
        pid, started_s = int(number), float(started)
    except ValueError:
        raise ConfigError(f"parent ({identity}) must be PID:START_TIME.") from None
    try:
        parent = psutil.Process(pid)
        if abs(parent.create_time() - started_s) > _MAX_START_DRIFT_S:
            raise psutil.NoSuchProcess(pid)
    except psutil.NoSuchProcess:
        raise MachineError(f"the parent process {pid} is gone already.") from None

    def end() -> None:
        if last is not None:
            last()
        os._exit(0)

    def watch() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while parent.is_running() and parent.status() != psutil.STATUS_ZOMBIE:
                time.sleep(WATCH_S)
        end()

    def drain() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        end()

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()
    if watch_stdin:
        threading.Thread(target=drain, name="watch-stdin", daemon=True).start()


class Child:
    """A program of ours that runs beside us and ends before us."""

    def __init__(
        self, name: str, command: Sequence[str], *, first_line: str, folder: Path | None = None
    ) -> None:
        """Start `command` and hand it `first_line` on standard input, out of sight of others."""
        self.name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            cwd=folder,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._words: deque[str] = deque(maxlen=20)
        self._readers = [
            threading.Thread(target=self._read_report, name=f"{name}-stdout", daemon=True),
            threading.Thread(target=self._read_words, name=f"{name}-stderr", daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        with contextlib.suppress(OSError):
            self._stdin.write(first_line + "\n")
            self._stdin.flush()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def report(
        self, timeout_s: float, *, meanwhile: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Wait for the next JSON object the child prints; most print one, when they are ready.

        Args:
            timeout_s: how long to wait.
            meanwhile: is called twice a second; what it raises ends the wait.

        Raises:
            MachineError: the child ended or said nothing in time.
        """
        until = time.monotonic() + timeout_s
        while True:
            meanwhile()
            with contextlib.suppress(queue.Empty):
                said = self._said.get(timeout=min(_LOOK_EVERY_S, timeout_s))
                break
            if time.monotonic() >= until:
                raise MachineError(f"the {self.name} was not ready within {timeout_s:g} s.")
        if said is None:
            raise MachineError(self.epitaph())
        return said

    def alive(self) -> bool:
        """Whether the child still runs."""
        return self._process.poll() is None

    def epitaph(self) -> str:
        """Say in one sentence how the child ended, with its last words."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_GRACE_S)
        for reader in self._readers:
            reader.join(timeout=0.5)
        code = self._process.returncode
        how = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
        words = f": {self._words[-1]}" if self._words else "."
        return f"the {self.name} has ended ({how}){words}"

    def stop(self) -> None:
        """End the child and whatever it started; returns within a few seconds."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        for ask in (None, signal.SIGTERM, signal.SIGKILL):
            if ask is not None:
                self._signal(ask)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_GRACE_S)
                break
        self._signal(signal.SIGKILL)
        for reader in self._readers:
            reader.join(timeout=0.5)

    @property
    def _stdin(self) -> IO[str]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _signal(self, number: signal.Signals) -> None:
        """Signal the child's whole group; it leads one, being in a session of its own."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _read_report(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with contextlib.suppress(ValueError):
                    said = json.loads(line)
                    if isinstance(said, dict):
                        self._said.put(said)
        self._said.put(None)

    def _read_words(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                if line.strip():
                    self._words.append(line.strip())


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs `module` with this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def _psutil() -> Any:
    try:
        import psutil
    except ImportError:
        raise MachineError(
            "psutil is missing; install the extra with `pip install -e '.[ui]'`."
        ) from None
    return psutil
