"""What an act works with, how one is declared, and how one is done by its name.

An act takes `Hands` and the newest trace, changes the deployment through its control, its options
or its files, as an operator would, and returns one sentence about what was done.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError, nearest
from workbench.drills.scenario import Scenario

if TYPE_CHECKING:  # the engine brings torch, and whoever only reads drills has none to work on
    from engine.routing.table import RoutingTable
    from engine.runtime.control import Control
    from workbench.drills.deployment import Deployment
    from workbench.trace.trace import Trace

ACTS: dict[str, Callable[..., str]] = {}
"""By name, as the command line and drill files call them."""


NEEDS: dict[str, str] = {}
"""By act: what a drill's engine must have for it to make sense."""


def act(function: Callable[..., str]) -> Callable[..., str]:
    """Declare a function as an act, called by its name with hyphens."""
    ACTS[function.__name__.replace("_", "-")] = function
    return function


def act_where(need: str) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """Declare an act that only makes sense with what its need names."""

    def declared(function: Callable[..., str]) -> Callable[..., str]:
        NEEDS[function.__name__.replace("_", "-")] = need
        return act(function)

    return declared


def offered(scenario: Scenario) -> list[str]:
    """Return the acts that make sense in a drill; the others are refused with a reason."""
    there = {
        "ranks": "ranks" in scenario.needs,
        "files": scenario.deployed.files,
        "instances": scenario.deployed.instances > 1,
        "jobs": bool(scenario.deployed.jobs),
        "requests": bool(scenario.deployed.guest),
    }
    return [name for name in ACTS if there.get(NEEDS.get(name, ""), True)]


@dataclass(frozen=True, slots=True)
class Hands:
    """What an act works with."""

    deployment: Deployment
    publish: Callable[[RoutingTable], None]
    """Publishes a table and notes it in the change record."""
    run: Callable[[int], None]
    """Runs traffic until so many rows are recorded."""
    trace: Callable[[], Trace]
    """Returns what is recorded since the last change."""
    refuse: Callable[[str], None]
    """Lets the gateway refuse requests of a label from now on."""

    @property
    def control(self) -> Control:
        """The running engine's.

        Raises:
            RequestError: there is none.
        """
        return self.deployment.require().control


def perform(name: str, arguments: Mapping[str, Any], hands: Hands, trace: Trace) -> str:
    """Do one act by name.

    Raises:
        ConfigError: there is no such act, or its arguments do not fit it.
        RoutingError: the engine refused.
    """
    return called(ACTS, name, arguments, hands, trace)


def called(
    acts: Mapping[str, Callable[..., str]], name: str, arguments: Mapping[str, Any], *given: Any
) -> str:
    """Call one of `acts` with what is given and what was asked for, once that fits.

    Raises:
        ConfigError: there is no such act, or its arguments do not fit it.
    """
    if name not in acts:
        raise ConfigError(
            f"unknown act {name!r}{nearest(name, acts)} known acts: {', '.join(acts)}."
        )
    try:
        bound = inspect.signature(acts[name]).bind(*given, **arguments)
    except TypeError as wrong:
        raise ConfigError(f"act {name}: {wrong}.") from None
    for key, value in arguments.items():
        _check_type(name, key, value, acts[name].__annotations__[key])
    return acts[name](*bound.args, **bound.kwargs)


def _check_type(act: str, key: str, value: Any, wanted: str) -> None:
    """Refuse a value that is not of the annotated kind; a message from outside may hold any."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    right = {
        "float": whole or isinstance(value, float),
        "int": whole,
        "int | None": whole or value is None,
        "str": isinstance(value, str),
        "Sequence[int]": isinstance(value, list | tuple)
        and all(isinstance(item, int) and not isinstance(item, bool) for item in value),
    }[wanted]
    if not right:
        raise ConfigError(f"act {act}: {key} ({value!r}) must be of the kind {wanted}.")
