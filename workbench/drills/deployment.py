"""What a drill runs: an engine as it is deployed, restarted with other options, lost, brought back.

An operator has more than a running engine: the options it was started with, a model folder, a log
of its starts, processes that belong to it, and jobs that run beside it. A drill may break any of
these, and a learner may change any of them; `restore` puts all of it back.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError, MachineError, RequestError, WorkbenchError, nearest
from engine.events import Sink, Tee
from engine.faults import Fault
from engine.runtime.telemetry import Telemetry
from workbench import paths
from workbench.drills.jobs import Job
from workbench.lifecycle import signals_held

if TYPE_CHECKING:
    from engine import Engine, EngineConfig

BASE: Mapping[str, Any] = {"num_blocks": 1024, "num_threads": 1, "drill": True}
"""Options of every drill's engine unless its file says otherwise."""
READY_BY = COMPLETION, PROCESS = ("completion", "process")
"""An instance is ready when a completion succeeds, or when its process lives."""
FIXED = ("model", "drill", "run_on", "num_devices", "num_ranks", "attention_ranks", "num_threads")
"""Options that a drill's engine keeps, whatever is asked."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A fault that is set, and set again in an engine that is started anew."""

    fault: Fault
    until: float
    """Monotonic seconds."""
    rank: int | None


@dataclass(slots=True)
class Extent:
    """What a drill may break beside the running engine."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `EngineConfig`, as they are right."""
    files: bool = False
    """Whether the engine runs from a copy of the model folder, which may be damaged."""
    jobs: Sequence[Job] = ()
    instances: int = 1
    """Engines of the same options; all but the first only answer known questions."""


class Deployment:
    """One engine (or several instances of it), as an operator runs it."""

    def __init__(self, extent: Extent, model: Path, sink: Sink | None = None) -> None:
        """Copy the model folder if the drill may damage it; nothing is started yet."""
        self._right: dict[str, Any] = {**BASE, **extent.options}
        self._sink, self._files = sink, extent.files
        self.published = model
        """The model folder as it was published; never written to."""
        self.folder = self._copied(model) if extent.files else model
        """The model folder the engine is started from."""
        self.options: dict[str, Any] = dict(self._right)
        """As deployed now."""
        self.engine: Engine | None = None
        self.others: list[Engine | None] = [None] * (extent.instances - 1)
        """The further instances."""
        self.other_options: list[dict[str, Any]] = [dict(self._right) for _ in self.others]
        self.starts: list[dict[str, Any]] = []
        """The log of starts and crashes, oldest first: `ok`, `said`, `seconds`."""
        self.generation = 0
        """How many engines there have been."""
        self.jobs = {job.name: job for job in extent.jobs}
        self.on_start: Callable[[], None] = lambda: None
        """Called when an engine was started again."""
        self._stream: Telemetry | None = None
        self.ready_by = COMPLETION
        """How the gateway tells which instance is ready: one of `READY_BY`."""
        self.broken_off = False
        """Whether a step was left in its middle: then ranks may still be answering it."""
        self._standing: dict[str, Standing] = {}
        self._healers: list[Callable[[], None]] = []
        self._ranks: dict[int, int] = {}

    # ---- start and stop

    def open(self) -> None:
        """Start all engines and jobs as they are right.

        Raises:
            WorkbenchError: one could not start.
        """
        if any(job.watches for job in self.jobs.values()):
            self.telemetry()
        self.engine = self._made(self.options, self._sink)
        self._opened()
        for index, options in enumerate(self.other_options):
            self.others[index] = self._made(options, None)
        for job in self.jobs.values():
            job.start(self)

    def restart(self, instance: int = 0, **changes: Any) -> str:
        """End an engine and start it anew, with options changed; return how that went.

        Raises:
            ConfigError: an option is not valid; nothing has happened then.
        """
        options = self.other_options[instance - 1] if instance else self.options
        return self._deploy(instance, {**options, **changes})

    def _deploy(self, instance: int, options: dict[str, Any]) -> str:
        """Start an engine anew with exactly these options."""
        self._config(options)
        began = time.perf_counter()
        which = f"instance {instance}" if self.others else "the engine"
        if instance:
            self._close(self.others[instance - 1])
            self.others[instance - 1], self.other_options[instance - 1] = None, options
        else:
            self._close(self.engine)
            self.engine, self.options = None, options
        try:
            made = self._made(options, None if instance else self._sink)
        except WorkbenchError as refused:
            said = f"{which} did not start: {refused}"
            self._log(False, said, began)
            return said
        if instance:
            self.others[instance - 1] = made
        else:
            self.engine = made
            self._opened()
        said = f"{which} was started again in {time.perf_counter() - began:.1f} s"
        self._log(True, said, began)
        return said

    def crashed(self, why: str) -> None:
        """Take note that the engine has ended by itself."""
        engine, self.engine = self.engine, None
        self._close(engine)
        self._log(False, f"the engine ended: {why}", time.perf_counter())

    def telemetry(self) -> Telemetry:
        """Return the stream that screens watch; it is made when it is first asked for."""
        if self._stream is None:
            self._stream = Telemetry()
        return self._stream

    def require(self) -> Engine:
        """Return the running engine.

        Raises:
            RequestError: there is none.
        """
        if self.engine is None:
            raise RequestError("the engine does not run; see its log of starts, and restart it.")
        return self.engine

    def close(self) -> None:
        """End everything and remove the copy of the model folder; again does nothing."""
        self._heal_outside()
        for job in self.jobs.values():
            job.stop()
        for engine in (self.engine, *self.others):
            self._close(engine)
        self.engine, self.others = None, [None] * len(self.others)
        if self._stream is not None:
            self._stream.close()
        if self._files:
            shutil.rmtree(self.folder, ignore_errors=True)

    # ---- faults

    def inject(self, point: str, fault: Fault, lease_s: float, *, rank: int | None = None) -> None:
        """Set a fault that stays over restarts until its lease is over or it is healed."""
        self._standing[point] = Standing(fault, time.monotonic() + lease_s, rank)
        if self.engine is not None:
            self.engine.control.inject(point, fault, lease_s, rank=rank)

    def heal(self, point: str) -> None:
        """Clear a fault point for good."""
        self._standing.pop(point, None)
        if self.engine is not None:
            self.engine.control.clear(point)

    def undo_with(self, healer: Callable[[], None]) -> None:
        """Note how something outside the engine is healed, such as a frozen process."""
        self._healers.append(healer)

    # ---- what an operator reads

    @property
    def is_ranked(self) -> bool:
        """Whether the engine runs on several processes."""
        return int(self._right.get("num_ranks", 1)) > 1

    @property
    def has_files(self) -> bool:
        """Whether the engine runs from a copy of the model folder."""
        return self._files

    @property
    def all_options(self) -> tuple[Mapping[str, Any], ...]:
        """The options of every instance, as deployed now."""
        return (self.options, *self.other_options)

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks that were started and do not take part."""
        return [
            rank for rank in self._ranks if self.engine is None or rank not in self.engine.ranks
        ]

    def facts(self) -> dict[str, Any]:
        """Return how the engine is deployed, fit for JSON."""
        return {
            "running": self.engine is not None,
            "options": _told(self.options),
            "starts": [dict(entry) for entry in self.starts],
            "ranks": {str(rank): rank not in self.missing_ranks for rank in self._ranks},
            "instances_running": self.instances_running,
            "instances_ready": self.instances_ready,
            "ready_by": self.ready_by,
            "looking": self._looking(),
            "jobs": [job.facts() for job in self.jobs.values() if not job.hidden],
            "instances": [_told(options) for options in self.all_options],
        }

    @property
    def instances_running(self) -> list[bool]:
        """Which instances have an engine, so that a completion would succeed."""
        return [engine is not None for engine in (self.engine, *self.others)]

    @property
    def instances_ready(self) -> list[bool]:
        """Which instances the gateway takes for ready and sends requests to."""
        running = self.instances_running
        return running if self.ready_by == COMPLETION else [True] * len(running)

    def _looking(self) -> dict[str, Any]:
        """Return what the stream of the screens says of its viewers."""
        frame = self._stream.latest if self._stream is not None else None
        return dict(frame.meta.get("looking", {})) if frame is not None else {}

    # ---- files

    def write_model(self, key: str, value: Any) -> None:
        """Change one entry of the model's config.json, and of the manifest with it."""
        path = self.folder / "config.json"
        config = json.loads(path.read_text("utf-8")) | {key: value}
        path.write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        self.note_in_manifest(path.name)

    def note_in_manifest(self, name: str) -> None:
        """Let the manifest list one file as it is, if it lists it at all."""
        from engine.checkpoint.manifest import NAME

        file, path = self.folder / name, self.folder / NAME
        content = json.loads(path.read_text("utf-8"))
        if name not in content["files"]:
            return
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        content["files"][name] = {"bytes": file.stat().st_size, "sha256": digest}
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", "utf-8")

    # ---- back to what was right

    def restore(self) -> None:
        """Heal every fault, put files, options, jobs and ranks back; again does no harm."""
        self._heal_outside()
        for point in list(self._standing):
            self.heal(point)
        damaged = self._files and self._mend_files()
        self.ready_by = COMPLETION
        for job in self.jobs.values():
            if job.hung:
                job.stop()
            job.start(self)
        for index, options in enumerate(self.other_options):
            if options != self._right or self.others[index] is None:
                self._deploy(index + 1, dict(self._right))
        if self.engine is None or damaged or self.options != self._right or self._strange_ranks:
            self._deploy(0, dict(self._right))
        if self.engine is None:
            raise MachineError(f"the engine could not be restored: {self.starts[-1]['said']}")

    @property
    def _strange_ranks(self) -> bool:
        """Whether ranks are gone, new, or no longer hold what they held at the start."""
        assert self.engine is not None
        table = self.engine.table
        if not self._ranks:
            return False
        moved = self.broken_off or table.version > 0
        return moved or dict(self.engine.ranks) != self._ranks

    def _heal_outside(self) -> None:
        while self._healers:
            self._healers.pop()()
        self._thaw()

    def _thaw(self) -> None:
        """Let ranks run on that were stopped: a frozen one could not hear that it is to end."""
        for pid in self._ranks.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGCONT)

    def _mend_files(self) -> bool:
        """Copy every file that is not as published; return whether there was one."""
        mended = False
        for there in self.folder.iterdir():
            if not (self.published / there.name).exists():
                there.unlink()
                mended = True
        for right in self.published.iterdir():
            mine = self.folder / right.name
            if not mine.exists() or mine.read_bytes() != right.read_bytes():
                shutil.copyfile(right, mine)
                mended = True
        return mended

    # ---- inside

    def _made(self, options: Mapping[str, Any], sink: Sink | None) -> Engine:
        with signals_held():
            from engine import Engine

        watched = [one for one in (sink, self._stream) if one is not None]
        return Engine(self._config(options), sink=Tee(watched) if sink is not None else None)

    def _config(self, options: Mapping[str, Any]) -> EngineConfig:
        with signals_held():
            from engine import EngineConfig

        known = [each.name for each in fields(EngineConfig)]
        for name in options:
            if name not in known:
                free = ", ".join(each for each in known if each not in FIXED)
                raise ConfigError(
                    f"unknown option {name!r}{nearest(name, known)} known options: {free}."
                )
        named = dict(options)
        if isinstance(named.get("draft"), str):
            named["draft"] = paths.model_folder(named["draft"])
        return EngineConfig(model=self.folder, **named)

    def _opened(self) -> None:
        assert self.engine is not None
        self.broken_off = False
        self.generation += 1
        self._ranks = dict(self.engine.ranks)
        for point, standing in self._standing.items():
            if (left_s := standing.until - time.monotonic()) > 0:
                self.engine.control.inject(point, standing.fault, left_s, rank=standing.rank)
        if self.generation > 1:
            self.on_start()

    def _log(self, ok: bool, said: str, began: float) -> None:
        self.starts.append(
            {"ok": ok, "said": said, "seconds": round(time.perf_counter() - began, 2)}
        )

    def _close(self, engine: Engine | None) -> None:
        if engine is not None:
            self._thaw()
            with contextlib.suppress(WorkbenchError):
                engine.close()

    def _copied(self, model: Path) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="workbench-drill-"))
        for file in model.iterdir():
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
        return folder


def _told(options: Mapping[str, Any]) -> dict[str, str]:
    """Return options as an operator reads them, without what only makes the engine a drill's."""
    return {name: str(value) for name, value in sorted(options.items()) if name != "drill"}
