"""The exception tree for mistakes a user can make and mend.

`str(error)` is one sentence: what was wrong, what it was, what is allowed, what to do. The command
line prints it and exits with `exit_code`. Faults of our own are asserts, not these.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class WorkbenchError(Exception):
    """Any mistake of the user's; the message is one sentence for them."""

    exit_code = 1


class ConfigError(WorkbenchError):
    """An option has a value that is not allowed."""

    exit_code = 2


class RequestError(WorkbenchError):
    """A request asks for something the engine cannot do (too long, an id out of range)."""

    exit_code = 2


class CheckpointError(WorkbenchError):
    """A model folder is missing, damaged, or does not fit its config."""


class TraceError(WorkbenchError):
    """A trace file is damaged or was written by a newer version."""


class RoutingError(WorkbenchError):
    """A routing table, plan or policy is not valid, or two versions met."""


class ExchangeError(WorkbenchError):
    """Ranks could not exchange: one died, or did not answer within the time allowed."""


class RankError(WorkbenchError):
    """A rank could not be started, stopped or recovered."""


class KernelError(WorkbenchError):
    """Arguments of an operation do not fit one another (shape, format, device, ids)."""

    exit_code = 2


class FaultError(WorkbenchError):
    """A fault point is unknown or a fault cannot be set."""

    exit_code = 2


class MachineError(WorkbenchError):
    """This machine lacks something that was asked for."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known name closest to `name`, else a full stop."""
    match = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {match[0]!r}?" if match else "."
