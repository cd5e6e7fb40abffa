"""Demos: a playlist of steps that a presenter shows on a running engine.

    from workbench import demos
    demos.list()
    with demos.opened(demos.find("routing-in-five-minutes")) as player:
        report = player.rehearse()

A step says what is shown, what is done to the engine, and what everybody must then be able to
measure. Entering a step first puts the engine back as it was at the start, then does the step's
actions, so that going back, jumping and coming late all lead to the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.demos.player import Player, opened
from workbench.demos.playlist import Playlist, find, playlists

__all__ = ["Player", "Playlist", "find", "list", "opened"]


def list() -> Sequence[dict[str, Any]]:
    """Return every demo's id, title, minutes, number of steps and needs."""
    return [playlist.summary for playlist in playlists()]
