"""End whatever drill runs or was left behind, and prove that all is as it was before it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import MachineError, RequestError, WorkbenchError
from workbench.drills.client import joined
from workbench.drills.files import find
from workbench.drills.leftovers import clean, damaged, gone_where
from workbench.drills.proof import compared
from workbench.drills.store import Store


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
            raise damaged(store)
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
    return found | {"how": gone_where(facts)["reason"], "proof": _fresh_proof(facts, key)}


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
