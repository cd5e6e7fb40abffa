"""How much memory a process holds, where the system tells."""

from __future__ import annotations

import os


def resident_bytes(pid: int) -> int | None:
    """Return the resident memory of a process; None where it cannot be told."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
