"""Close the books of a drill whose process was killed, by what it left in its state folder.

A drill's engine dies with its process, so nothing here restores anything; see
`workbench.drills.resetting` for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import MachineError
from workbench.drills.files import find
from workbench.drills.store import Store

_GONE = {"ended": True, "reason": "the drill's process has gone, and its engine with it"}


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
            {"format": 1, "briefing": find(facts["drill"]).briefing, **gone_where(facts)},
        )
    store.forget()
    return True


def gone_where(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return how the journal of a drill ends whose process was killed, by what it announced."""
    if "target" not in facts:
        return _GONE
    reason = "the drill's process has gone; its lease ends it at the service"
    return {"ended": True, "reason": reason}


def damaged(store: Store) -> MachineError:
    """Return the error for a drill that runs and whose announcement cannot be read."""
    return MachineError(
        f"what the drill in {store.folder} announced is damaged, and it still runs: end it with "
        "Ctrl-C in its own terminal, then `workbench drill reset`."
    )
