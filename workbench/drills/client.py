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
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

from engine.errors import MachineError, RequestError, WorkbenchError
from engine.runtime.telemetry import Message, TelemetryClient
from workbench import paths
from workbench.drills.files import find, safe_of
from workbench.drills.proof import compared
from workbench.drills.scenario import check_minutes
from workbench.drills.store import Store
from workbench.lifecycle import Child, own_identity, python_command

READY_S = 240.0
"""How long a drill may say nothing while it loads, warms up and breaks its engine."""
ANSWER_S = 120.0
_GONE = {"ended": True, "reason": "the drill's process has gone, and its engine with it"}


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
            raise _damaged(store) from None
        """Where the drill's engine can be watched, as any other engine's telemetry."""
        self._child, self.who = child, who
        self._live = threading.Event()
        self._client = TelemetryClient(self.address, self.key, on_frame=self._on_frame)
        self._client.start()
        self._wait()

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
        raise _damaged(store)
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


def clean(store: Store) -> bool:
    """Close the books of a drill whose process was killed; returns whether there was one.

    Its engine died with it, so nothing is left to restore; the journal says so. A damaged
    announcement is set aside.
    """
    if store.damaged and not store.busy:
        return store.set_aside() is not None
    facts = store.current()
    if facts is None or store.busy:
        return False
    try:
        store.read(facts["journal"])
    except MachineError:
        store.save(
            facts["journal"],
            {"format": 1, "briefing": find(facts["drill"]).briefing, **_gone_where(facts)},
        )
    store.forget()
    return True


def _gone_where(facts: Mapping[str, Any]) -> dict[str, Any]:
    if "target" not in facts:
        return _GONE
    reason = "the drill's process has gone; its lease ends it at the service"
    return {"ended": True, "reason": reason}


def reset(state: str | Path | None = None, key: str | None = None) -> dict[str, Any]:
    """End whatever drill runs or was left in a state folder, restored; again does nothing.

    A living engine is restored. Of one whose process was killed nothing is left, so a fresh engine
    is started and held against the hashes from before the drill. A service that was held for one is
    asked to put everything back, which needs a `key`.

    Returns:
        `found`, the drill ended, `unknown` where its state is damaged, or None; `how`, in words;
        `proof`, the hashes before and after, where there are any.

    Raises:
        MachineError: the state is damaged and its drill still runs.
    """
    store = Store.at(state)
    facts, busy = store.current(), store.busy
    if store.damaged:
        if busy:
            raise _damaged(store)
        how = f"its state was damaged and has been set aside as {store.set_aside()}"
        return {"found": "unknown", "how": how, "proof": None}
    if facts is None:
        return {"found": None, "how": "no drill was running", "proof": None}
    found = {"found": facts["drill"]}
    if busy:
        proof = _finish(store)
        if not _gone(store, 5.0):
            _kill(str(facts.get("process")))
            _gone(store, 5.0)
        clean(store)
        if proof is not None:
            return found | {"how": "restored and ended", "proof": proof}
        engine = "" if "target" in facts else ", and its engine with it"
        how = f"it did not answer, so its process was ended{engine}"
        return found | {"how": how, "proof": _fresh_proof(facts, key)}
    clean(store)
    result = store.read(facts["journal"])[1].get("result")
    if isinstance(result, dict) and {"reason", "proof"} <= set(result):
        return found | {"how": f"ended before: {result['reason']}", "proof": result["proof"]}
    return found | {"how": _gone_where(facts)["reason"], "proof": _fresh_proof(facts, key)}


def _finish(store: Store) -> dict[str, Any] | None:
    """Ask a living drill to restore and end; return its proof, or None if it does not answer."""
    try:
        with joined(store.folder) as drill:
            proof: dict[str, Any] = drill.finish("reset", graded=False)["proof"]
    except (MachineError, RequestError):
        return None
    return proof


def _fresh_proof(facts: Mapping[str, Any], key: str | None) -> dict[str, Any] | None:
    """Hold a fresh engine against the hashes a drill announced, or ask the service it ran on.

    None if none can be started, or what was announced is damaged.
    """
    if "target" in facts:
        from workbench.drills.on_service import put_back
        from workbench.drills.service import Service

        try:
            with contextlib.closing(Service(str(facts["target"]), key)) as service:
                return put_back(service, str(facts.get("lease")))
        except WorkbenchError:
            return None
    from workbench.drills.opening import fresh_hashes

    hashes, model = facts.get("hashes"), facts.get("model")
    if not isinstance(hashes, dict) or not isinstance(model, str):
        return None
    try:
        return compared(hashes, fresh_hashes(find(facts["drill"]), model))
    except (WorkbenchError, KeyError):
        return None


def _damaged(store: Store) -> MachineError:
    return MachineError(
        f"what the drill in {store.folder} announced is damaged, and it still runs: end it with "
        "Ctrl-C in its own terminal, then `workbench drill reset`."
    )


def _gone(store: Store, wait_s: float) -> bool:
    until = time.monotonic() + wait_s
    while store.busy:
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _kill(identity: str) -> None:
    """Kill the process of this identity, if it is still the same one."""
    import psutil

    pid, _, started = identity.partition(":")
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, ValueError):
        if abs(psutil.Process(int(pid)).create_time() - float(started)) < 2.0:
            os.kill(int(pid), signal.SIGKILL)
