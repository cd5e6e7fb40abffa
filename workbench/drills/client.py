"""Start a drill in a process of its own, or join one that runs; one object speaks for both.

    drill = attach()                 # or start("routing-jitter")
    drill.observe()["signals"]
    drill.act("smooth", bonus=1.2)
    drill.diagnose("restless-gate")
    drill.finish()["grade"]

The engine is another process's; nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

from engine.errors import MachineError, RequestError
from engine.runtime.telemetry import Message, TelemetryClient
from workbench import paths
from workbench.drills.files import find, safe_of
from workbench.drills.leftovers import clean, damaged
from workbench.drills.scenario import check_minutes
from workbench.drills.store import Store
from workbench.lifecycle import Child, own_identity, python_command

READY_S = 240.0
"""How long a drill may say nothing while it loads, warms up and breaks its engine."""
ANSWER_S = 120.0


class Drill:
    """A running drill, seen from outside its process."""

    def __init__(
        self, facts: dict[str, Any], store: Store, child: Child | None = None, who: str = ""
    ) -> None:
        """Connect to an announced drill.

        Args:
            facts: what was announced.
            store: where.
            child: its process, for whoever started it.
            who: a name that stands in the journal beside what is asked for here.

        Raises:
            MachineError: nobody answers there, or what was announced is damaged.
        """
        self.id, self.journal_name, self.store = facts["drill"], facts["journal"], store
        try:
            host, port = facts["address"]
            self.address, self.key = (str(host), int(port)), bytes.fromhex(facts["key"])
        except (LookupError, TypeError, ValueError):
            raise damaged(store) from None
        """Where the drill's engine can be watched, as any other engine's telemetry."""
        self._child, self.who = child, who
        self._live = threading.Event()
        self._client = TelemetryClient(self.address, self.key, on_frame=self._on_frame)
        self._client.start()
        self._wait()

    def known_as(self, who: str) -> Drill:
        """Return this same drill for somebody else, whose name then stands in the journal."""
        other = copy.copy(self)
        other.who = who
        return other

    def briefing(self) -> dict[str, Any]:
        """Return what a learner may know before they begin."""
        return self._ask("briefing")

    def state(self) -> dict[str, Any]:
        """Return how the drill stands: time, clues, acts, signals as last sampled."""
        return self._ask("state")

    def observe(self) -> dict[str, Any]:
        """Measure every signal now; show load, table and policy as an operator sees them."""
        return self._ask("observe")

    def act(self, act: str, /, **arguments: Any) -> dict[str, Any]:
        """Change the engine as an operator would; the acts are in `workbench.drills.acts`."""
        return self._ask("act", act=act, arguments=arguments)

    def diagnose(self, option: str) -> dict[str, Any]:
        """Name the cause, one of the briefing's options; the last one counts."""
        return self._ask("diagnose", option=option)

    def check(self) -> dict[str, Any]:
        """Run the checks now; each passes, fails or could not run."""
        return self._ask("check")

    def hint(self) -> dict[str, Any]:
        """Take the next clue."""
        return self._ask("hint")

    def remark(self, text: str) -> dict[str, Any]:
        """Write a remark into the journal, for the others and for the debrief."""
        return self._ask("remark", text=text)

    def finish(self, reason: str = "finished", *, graded: bool = True) -> dict[str, Any]:
        """Grade, restore, and return the result with its proof; the drill then ends."""
        return self._ask("finish", reason=reason, graded=graded)

    def journal(self) -> dict[str, Any]:
        """Return the journal of this drill, once it has ended.

        Raises:
            MachineError: there is none.
        """
        clean(self.store)
        return self.store.read(self.journal_name)[1]

    @property
    def running(self) -> bool:
        """Whether the drill's process lives."""
        return self._child.alive() if self._child else self._client.state == "live"

    def close(self) -> None:
        """Let go of the drill; whoever started it also ends it, restored."""
        if self._child is not None and self._child.alive():
            with contextlib.suppress(RequestError):
                self.finish("closed", graded=False)
            self._wait_for_end()
        self._client.close()
        if self._child is not None:
            self._child.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, action: str, **detail: Any) -> dict[str, Any]:
        """Send one message.

        Raises:
            RequestError: the drill refused, did not answer, or is gone.
        """
        try:
            return self._client.control(action, timeout_s=ANSWER_S, who=self.who, **detail)
        except ValueError:  # what JSON has no word for
            raise RequestError(
                "values must be finite numbers or texts; nan and inf are not."
            ) from None

    def _wait(self) -> None:
        until = time.monotonic() + 15.0
        while not self._live.wait(timeout=0.2):
            if self.store.ended(self.journal_name):
                self._client.close()
                raise MachineError(
                    f"the drill {self.id} has just finished; `workbench drill report` tells of it."
                )
            if time.monotonic() < until:
                continue
            self._client.close()
            raise MachineError(
                f"the drill {self.id} does not answer ({self._client.reason}); "
                "`workbench drill reset` clears what is left of it."
            )

    def _wait_for_end(self) -> None:
        assert self._child is not None
        until = time.monotonic() + 5.0
        while self._child.alive() and time.monotonic() < until:
            time.sleep(0.05)

    def _on_frame(self, frame: Message) -> None:
        self._live.set()


def start(
    drill: str,
    *,
    state: str | Path | None = None,
    model: str = paths.DEFAULT_MODEL,
    seed: int | None = None,
    minutes: float | None = None,
    surprise: bool = False,
    who: str = "",
    target: str | None = None,
    key: str | None = None,
    on_stage: Callable[[str, int, int], None] = lambda stage, done, of: None,
) -> Drill:
    """Start a drill in a process of its own, which ends with this one.

    Args:
        drill: its id.
        state: the state folder; None takes the user's.
        model: folder or name of the model.
        seed: another layer, another expert than the file's.
        minutes: how long the fault may last; None takes the file's.
        surprise: keep its title back, as in an incident.
        who: a name that stands in the journal beside what is asked for here.
        target: the address of a service to run it on, in place of an engine of its own.
        key: for that service, with the scopes infer, observe and operate.
        on_stage: is told twice a second which of `stages.STAGES` it is, with how many of how many
            parts are done; what it raises ends the start, and the engine with it.

    Raises:
        ConfigError: there is no such drill, its file is not valid, or it is not safe to run on a
            service.
        MachineError: another drill runs, or this one could not start.
    """
    scenario = find(drill)
    if minutes is not None:
        check_minutes(minutes)
    if target is None:
        paths.model_folder(model)
    else:
        _check_service(target, key, safe_of(scenario).ranks)
    store = Store.at(state)
    clean(store)
    options = {
        "drill": drill,
        "state": str(store.folder.absolute()),
        "model": str(model),
        "seed": seed,
        "minutes": minutes,
        "surprise": surprise,
        "parent": own_identity(),
        "target": target,
        "key": key,
    }
    return _launched(options, store, who, on_stage)


def _launched(
    options: Mapping[str, Any], store: Store, who: str, on_stage: Callable[[str, int, int], None]
) -> Drill:
    """Start a drill's process and wait until it runs; whatever goes wrong, nothing is left."""
    child = Child(
        "drill",
        python_command("workbench.drills.host"),
        first_line=json.dumps(options),
        folder=paths.root(),
    )
    try:
        said: dict[str, Any] = {"stage": "engine", "done": 0, "of": 0}
        while "ready" not in said:
            tell = partial(on_stage, str(said["stage"]), int(said["done"]), int(said["of"]))
            said = child.report(READY_S, meanwhile=tell)
        facts = store.current()
        if facts is None:
            raise MachineError("the drill ended as soon as it had started.")
        return Drill(facts, store, child, who)
    except BaseException:
        child.stop()  # its engine goes with it
        clean(store)
        raise


def _check_service(url: str, key: str | None, ranks: int) -> None:
    from workbench.drills.service import Service

    with contextlib.closing(Service(url, key)) as service:
        service.check(ranks)


def attach(state: str | Path | None = None, who: str = "") -> Drill:
    """Join the drill that runs in a state folder, under a name for the journal.

    Raises:
        MachineError: none runs there, or what it announced is damaged.
    """
    store = Store.at(state)
    facts, busy = store.current(), store.busy
    if busy and store.damaged:
        raise damaged(store)
    if facts is None and busy:
        raise store.between()
    if facts is None or not busy:
        raise MachineError(
            f"no drill is running in {store.folder}; start one with `workbench drill run ID`."
        )
    return Drill(facts, store, who=who)


@contextlib.contextmanager
def joined(state: str | Path | None = None) -> Iterator[Drill]:
    """Join the running drill for a few questions."""
    drill = attach(state, own_name())
    try:
        yield drill
    finally:
        drill.close()


def own_name() -> str:
    """Return the name that stands in the journal: `WORKBENCH_WHO`, or this user's."""
    import getpass

    try:
        return os.environ.get("WORKBENCH_WHO") or getpass.getuser()
    except (OSError, KeyError):
        return ""
