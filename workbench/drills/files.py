"""The files of drills: found by id, read, held against every rule before anything runs.

The field names are Chaos Toolkit's (title, description, tags, steady-state-hypothesis, method,
rollbacks) with what a lesson needs beside them. A file is validated against
`data/drills/schema.json` and against the probes, actions and acts that exist. The description tells
the symptom only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, nearest
from workbench import paths
from workbench.drills.scenario import (
    Call,
    Check,
    Deployed,
    Probe,
    Repair,
    Safe,
    Scenario,
    Tolerance,
)
from workbench.schema import call_faults, named, read_yaml, schema_faults


def folder() -> Path:
    """Return where the drills' files are."""
    return paths.data("drills")


def scenarios() -> list[Scenario]:
    """Return every drill, easiest first.

    Raises:
        ConfigError: a file is not valid.
    """
    found = [read(path) for path in sorted(folder().glob("*.yaml"))]
    return sorted(found, key=lambda scenario: (scenario.level, scenario.id))


def find(drill: str) -> Scenario:
    """Return one drill by its id.

    Raises:
        ConfigError: there is none, or its file is not valid.
    """
    return read(named("drill", drill, folder()))


def safe_of(scenario: Scenario) -> Safe:
    """Return how a drill runs on a service.

    Raises:
        ConfigError: it is not marked safe.
    """
    if scenario.safe is None:
        safe = ", ".join(one.id for one in scenarios() if one.safe is not None)
        raise ConfigError(
            f"the drill {scenario.id} is not marked safe, so it runs on an engine of its own only; "
            f"on a service may run: {safe}."
        )
    return scenario.safe


def read(path: Path) -> Scenario:
    """Read and validate one file.

    Raises:
        ConfigError: it cannot be read, breaks the schema, or names something that does not exist.
    """
    try:
        written_ns = path.stat().st_mtime_ns
    except OSError:
        written_ns = 0  # `read_yaml` says why
    return _as_written(path, written_ns)


@cache
def _as_written(path: Path, written_ns: int) -> Scenario:
    """Read a file once for each time it was written: lists of all drills are asked for often."""
    return parse(read_yaml(path), path.name, drill=path.stem)


def parse(raw: Any, file: str, *, drill: str | None = None) -> Scenario:
    """Validate the contents of a file and return the drill.

    Args:
        raw: what YAML gave.
        file: its name, for messages.
        drill: the id the file must have; None takes any.

    Raises:
        ConfigError: the contents break a rule; the message names file, place and rule.
    """
    raw = filled_in(raw, file)
    for message in schema_faults(raw, folder() / "schema.json"):
        raise ConfigError(f"{file}: {message}")
    scenario = _scenario(raw)
    for message in _faults(scenario, drill):
        raise ConfigError(f"{file}: {message}")
    return scenario


def filled_in(raw: Any, file: str) -> Any:
    """Return a file's contents with every `use: NAME` replaced by that part of `parts/parts.yaml`.

    What stands beside `use` is added to the part, or put in the place of what it has.

    Raises:
        ConfigError: there is no such part.
    """
    if isinstance(raw, list):
        return [filled_in(item, file) for item in raw]
    if not isinstance(raw, dict):
        return raw
    filled = {key: filled_in(value, file) for key, value in raw.items() if key != "use"}
    if "use" not in raw:
        return filled
    parts = _parts()
    if raw["use"] not in parts:
        raise ConfigError(f"{file}: unknown part {raw['use']!r}{nearest(str(raw['use']), parts)}")
    part = filled_in(parts[raw["use"]], file)
    if "tolerance" in filled and "probe" in part:
        part = {**part, "probe": {**part["probe"], "tolerance": filled.pop("tolerance")}}
    return {**part, **filled}


@cache
def _parts() -> dict[str, Any]:
    parts: dict[str, Any] = read_yaml(folder() / "parts" / "parts.yaml")
    return parts


def _scenario(raw: Mapping[str, Any]) -> Scenario:
    steady, solution = raw["steady-state-hypothesis"], raw["solution"]
    return Scenario(
        id=raw["id"],
        title=raw["title"],
        symptom=raw["symptom"],
        guide=raw["guide"],
        description=raw["description"].strip(),
        tags=tuple(raw["tags"]),
        level=raw["level"],
        minutes=raw["minutes"],
        needs=raw["needs"],
        deployed=Deployed(**raw.get("deployed", {})),
        seed=raw["seed"],
        hypothesis=steady["title"],
        signals=tuple(map(_probe, steady["probes"])),
        method=tuple(map(_call, raw["method"])),
        rollbacks=tuple(map(_call, raw["rollbacks"])),
        stop=tuple(map(_probe, raw["stop-conditions"])),
        question=raw["diagnosis"]["question"],
        options={name: text.strip() for name, text in raw["diagnosis"]["options"].items()},
        diagnosis_points=raw["diagnosis"]["points"],
        checks=tuple(
            Check(
                item["id"],
                item["title"],
                item["kind"],
                item["points"],
                _probe(item["probe"]),
                item["messages"],
            )
            for item in raw["checks"]
        ),
        clues=tuple(clue.strip() for clue in raw["clues"]),
        cause=solution["cause"],
        solution=solution["explanation"].strip(),
        repairs=tuple(map(_repair, solution["repairs"])),
        false_trails=tuple(map(_repair, raw["false-trails"])),
        safe=_safe(raw) if "safe" in raw else None,
    )


def _safe(raw: Mapping[str, Any]) -> Safe:
    """Return how a drill runs on a service; what `safe` leaves out is as in the rest."""
    own = {"fault", "delay_ms", "at", "ranks", "job"}
    safe = raw["safe"]
    there = {key: value for key, value in safe.items() if key not in own}
    rest = {key: value for key, value in raw.items() if key != "safe"}
    return Safe(
        fault=safe["fault"],
        delay_ms=safe["delay_ms"],
        one_rank=safe.get("at") == "one rank",
        ranks=safe["ranks"],
        job=safe.get("job", ""),
        scenario=_scenario({**rest, "deployed": {}, **there}),
    )


def _call(raw: Mapping[str, Any]) -> Call:
    provider = raw["provider"]
    return Call(raw["name"], provider["func"], provider.get("arguments", {}))


def _probe(raw: Mapping[str, Any]) -> Probe:
    tolerance = raw["tolerance"]
    low, high = tolerance["range"]
    return Probe(_call(raw), Tolerance(tolerance["type"], low, high))


def _repair(raw: Mapping[str, Any]) -> Repair:
    acts = [(act["act"], {key: act[key] for key in act if key != "act"}) for act in raw["acts"]]
    return Repair(raw["title"], tuple(acts))


def _faults(scenario: Scenario, drill: str | None) -> Iterator[str]:
    """Yield what the schema cannot see, one sentence each."""
    # Here, so that what only starts or joins a drill does not pay for them.
    from workbench.drills.acts import ACTS
    from workbench.drills.breaks import ACTIONS, undone
    from workbench.drills.jobs import job
    from workbench.drills.probes import OF_ENGINES

    if drill is not None and scenario.id != drill:
        yield f"id ({scenario.id}) must be the file's name, {drill}."
    for call in (*scenario.method, *scenario.rollbacks):
        yield from call_faults("action", call.func, call.arguments, ACTIONS)
    yield from _lesson_faults(scenario, OF_ENGINES, ACTS, given=2)
    for raw in scenario.deployed.jobs:
        try:
            job(raw)
        except ConfigError as wrong:
            yield str(wrong)
    yield from undone(scenario.rollbacks)
    if scenario.safe is not None:
        yield from (f"safe: {fault}" for fault in _safe_faults(scenario.safe))


def _safe_faults(safe: Safe) -> Iterator[str]:
    """Yield what is wrong with how a drill runs on a service."""
    from engine.errors import FaultError
    from engine.faults import SAFE
    from workbench.drills.acts_service import ACTS
    from workbench.drills.probes import OF_SERVICES

    if safe.fault not in SAFE:
        yield f"unknown fault {safe.fault!r}{nearest(safe.fault, SAFE)} known: {', '.join(SAFE)}."
        return
    try:
        SAFE[safe.fault].of(safe.delay_ms)
    except FaultError as wrong:
        yield str(wrong)
    yield from _lesson_faults(safe.scenario, OF_SERVICES, ACTS, given=1)


def _lesson_faults(
    scenario: Scenario,
    probes: Mapping[str, Callable[..., Any]],
    acts: Mapping[str, Callable[..., Any]],
    given: int,
) -> Iterator[str]:
    """Yield what is wrong with what is measured, asked, graded and repaired."""
    checked = (check.probe for check in scenario.checks)
    for probe in (*scenario.signals, *scenario.stop, *checked):
        yield from call_faults("probe", probe.call.func, probe.call.arguments, probes)
        if probe.tolerance.low > probe.tolerance.high:
            yield f"probe {probe.call.name!r}: the tolerance's range must ascend."
    for repair in (*scenario.repairs, *scenario.false_trails):
        for act, arguments in repair.acts:
            yield from call_faults("act", act, arguments, acts, given=given)
    if scenario.cause not in scenario.options:
        yield f"solution.cause ({scenario.cause}) must be one of the diagnosis options."
    ids = [check.id for check in scenario.checks]
    if len(set(ids)) < len(ids):
        yield "every check needs an id of its own."
    points = scenario.diagnosis_points + sum(check.points for check in scenario.checks)
    if points != 100:
        yield f"the points of diagnosis and checks must sum to 100, not {points}."
