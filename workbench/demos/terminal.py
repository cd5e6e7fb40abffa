"""A demo played by hand in the terminal: what is shown, the notes, and what is measured.

Lines are read on a thread of their own, so that the engine goes on meanwhile.
"""

from __future__ import annotations

import queue
import sys
import threading
from typing import TYPE_CHECKING

from workbench.demos.player import HOLDS, LATE, WAITING, Player
from workbench.demos.words import check_line

if TYPE_CHECKING:
    from rich.console import Console

HELP = "Enter next · b back · 1, 2, … jump · q end"
_STYLES = {HOLDS: "green", LATE: "red", WAITING: "dim"}
_MARKS = {HOLDS: "✓", LATE: "✗", WAITING: "·"}


def drive(player: Player) -> None:
    """Show the first step and follow what is typed, until `q`, the last step's end or no input."""
    from rich.console import Console

    console = Console()
    typed: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(typed,), name="keyboard", daemon=True).start()
    player.go(0)
    _show(console, player)
    told: set[int] = set()
    while True:
        player.run()
        for number, check in enumerate(player.checks):
            if number not in told and check.state != WAITING:
                told.add(number)
                line = f"  {_MARKS[check.state]} {check_line(check.report)}"
                console.print(line, style=_STYLES[check.state], markup=False, highlight=False)
        try:
            line_typed = typed.get_nowait()
        except queue.Empty:
            continue
        to = wanted(line_typed, player.at, len(player.playlist.steps))
        if to is None:
            return
        if to == player.at:
            console.print(HELP, style="dim")
            continue
        player.go(to)
        told = set()
        _show(console, player)


def wanted(line: str | None, at: int, steps: int) -> int | None:
    """Return the step that a typed line asks for; `at` when it asks for nothing, None to end.

    At step 2 of 7 (place 1): "" gives 2, "b" gives 0, "7" gives 6, "x" gives 1, "q" gives None.
    """
    word = "q" if line is None else line.strip().lower()
    if word in ("q", "quit", "exit"):
        return None
    if word in ("", "n", "next"):
        return at + 1 if at + 1 < steps else None
    if word in ("b", "back"):
        return max(0, at - 1)
    if word.isascii() and word.isdigit() and 1 <= int(word) <= steps:
        return int(word) - 1
    return at


def _read(typed: queue.SimpleQueue[str | None]) -> None:
    while line := sys.stdin.readline() if sys.stdin is not None else "":
        typed.put(line)
    typed.put(None)


def _show(console: Console, player: Player) -> None:
    from rich.padding import Padding

    step, steps = player.step, player.playlist.steps
    console.print()
    console.rule(f"[bold]{player.at + 1} of {len(steps)}  {step.title}[/bold]", align="left")
    for paragraph in step.text:
        console.print(Padding(paragraph, (1, 2, 0, 2)), markup=False, highlight=False)
    console.print()
    for note in step.say:
        console.print(Padding(f"» {note}", (0, 2, 0, 2)), style="italic", markup=False)
    for sentence in player.done:
        console.print(f"  ! {sentence}", style="yellow", markup=False, highlight=False)
    console.print(f"\n  {HELP}", style="dim")
