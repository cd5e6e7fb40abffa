"""A demo's file: the playlist, checked in full before anything runs.

The schema is `data/demos/schema.json`. What it cannot see (names of actions and measures, their
arguments, what a view needs) is checked here; an unknown word names the nearest known one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, nearest
from workbench import paths
from workbench.schema import call_faults, named, read_yaml, schema_faults

VIEWS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "text": (frozenset(), frozenset()),
    "map": (frozenset({"rows"}), frozenset({"layer", "domain"})),
    "stepper": (frozenset({"text", "token", "layer"}), frozenset()),
    "figure": (frozenset({"figure"}), frozenset()),
}
"""Kind of view -> the keys it needs, and those it may have."""


@dataclass(frozen=True, slots=True)
class Action:
    """Something done to the engine when a step is entered."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Expect:
    """Something everybody must be able to measure while a step is shown."""

    name: str
    measure: str
    arguments: Mapping[str, Any]
    low: float
    high: float
    within_s: float
    """How long after the step was entered it may take to hold."""


@dataclass(frozen=True, slots=True)
class Step:
    """One page of a demo."""

    id: str
    title: str
    text: tuple[str, ...]
    """Paragraphs that all see."""
    say: tuple[str, ...]
    """Notes that the presenter sees."""
    view: Mapping[str, Any]
    """What is drawn: its `kind`, and what that kind needs."""
    actions: tuple[Action, ...]
    expect: tuple[Expect, ...]


@dataclass(frozen=True, slots=True)
class Playlist:
    """One demo, valid."""

    id: str
    title: str
    description: str
    minutes: float
    needs: Mapping[str, int]
    """`devices`: logical devices of the demo's engine."""
    steps: tuple[Step, ...]

    @property
    def summary(self) -> dict[str, Any]:
        """Return the line of `workbench demo list`."""
        return {
            "id": self.id,
            "title": self.title,
            "minutes": self.minutes,
            "steps": len(self.steps),
            "needs": dict(self.needs),
        }


def folder() -> Path:
    """Return where the demos' files are."""
    return paths.data("demos")


def playlists() -> list[Playlist]:
    """Return every demo in the order of the ids.

    Raises:
        ConfigError: a file is not valid.
    """
    return [read(path) for path in sorted(folder().glob("*.yaml"))]


def find(demo: str) -> Playlist:
    """Return one demo by its id.

    Raises:
        ConfigError: there is none, or its file is not valid.
    """
    return read(named("demo", demo, folder()))


def read(path: Path) -> Playlist:
    """Read and validate one file; its id must be the file's name.

    Raises:
        ConfigError: it cannot be read, breaks the schema, or names something that does not exist.
    """
    playlist = parse(read_yaml(path), path.name)
    if playlist.id != path.stem:
        raise ConfigError(f"{path.name}: id ({playlist.id}) must be the file's name, {path.stem}.")
    return playlist


def parse(raw: Any, file: str) -> Playlist:
    """Validate the contents of a file, called `file` in messages, and return the demo.

    Raises:
        ConfigError: the contents break a rule; the message names file, place and rule.
    """
    for message in schema_faults(raw, folder() / "schema.json"):
        raise ConfigError(f"{file}: {message}")
    playlist = Playlist(
        id=raw["id"],
        title=raw["title"],
        description=raw["description"].strip(),
        minutes=raw["minutes"],
        needs=raw["needs"],
        steps=tuple(map(_step, raw["steps"])),
    )
    for message in _faults(playlist):
        raise ConfigError(f"{file}: {message}")
    return playlist


def _step(raw: Mapping[str, Any]) -> Step:
    return Step(
        id=raw["id"],
        title=raw["title"],
        text=tuple(paragraph.strip() for paragraph in raw["text"]),
        say=tuple(note.strip() for note in raw["say"]),
        view=raw["view"],
        actions=tuple(
            Action(item["do"], {key: item[key] for key in item if key != "do"})
            for item in raw.get("actions", ())
        ),
        expect=tuple(map(_expect, raw["expect"])),
    )


def _expect(raw: Mapping[str, Any]) -> Expect:
    low, high = raw["range"]
    arguments = raw.get("arguments", {})
    return Expect(raw["name"], raw["measure"], arguments, low, high, raw["within_s"])


def _faults(playlist: Playlist) -> Iterator[str]:
    """Yield what the schema cannot see, one sentence each."""
    from workbench.demos.actions import ACTIONS
    from workbench.demos.measures import MEASURES

    ids = [step.id for step in playlist.steps]
    if len(set(ids)) < len(ids):
        yield "every step needs an id of its own."
    for step in playlist.steps:
        yield from (f"step {step.id}: {fault}" for fault in _view_faults(step.view))
        for action in step.actions:
            faults = call_faults("action", action.name, action.arguments, ACTIONS)
            yield from (f"step {step.id}: {fault}" for fault in faults)
        for expect in step.expect:
            known = {name: measure.take for name, measure in MEASURES.items()}
            faults = call_faults("measure", expect.measure, expect.arguments, known)
            yield from (f"step {step.id}: {fault}" for fault in faults)
            if expect.low > expect.high:
                yield f"step {step.id}: the range of {expect.name!r} must ascend."


def _view_faults(view: Mapping[str, Any]) -> Iterator[str]:
    needed, allowed = VIEWS[view["kind"]]
    given = set(view) - {"kind"}
    for key in sorted(needed - given):
        yield f"a view of kind {view['kind']} needs {key!r}."
    for key in sorted(given - needed - allowed):
        yield f"a view of kind {view['kind']} has no {key!r}{nearest(key, needed | allowed)}"
