"""The four levels of routing, and where each of them is decided in this engine."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.lessons.note import Note, table


@dataclass(frozen=True, slots=True)
class Level:
    """One level at which a token is routed."""

    name: str
    question: str
    decided: str
    here: bool
    """Whether the engine decides it today; a test holds this against the code."""
    state: str
    """Where it stands, or what is only explained."""
    source: str
    """The file that decides it; where it will stand if it does not exist yet."""


LEVELS = (
    Level(
        "1 expert",
        "Which experts compute this token?",
        "when it happens: the gate's product is a part of the model anyway",
        True,
        "decided for every token in every layer; ban, force and favour experts with `control`",
        "engine/routing/gate.py",
    ),
    Level(
        "2 precision",
        "In which number format?",
        "beforehand, for blocks of 8 to 16 rows; a wrong guess re-runs only the rows it hit",
        True,
        "decided with `EngineConfig(precision='auto')`; else all rows have the engine's one format",
        "engine/routing/precision/__init__.py",
    ),
    Level(
        "3 model",
        "By the small draft model or the large target model?",
        "beforehand: the draft proposes tokens, the target accepts or rejects them",
        True,
        "decided with `--draft`, which names the bundled draft model; else the target writes alone",
        "engine/routing/speculation.py",
    ),
    Level(
        "4 device",
        "On which device, by which copy of the expert?",
        "when it happens, by looking it up in the routing table",
        True,
        "decided for every row on logical devices inside one process: the choice is real, the "
        "traffic between devices is counted and not sent",
        "engine/routing/device.py",
    ),
)


def levels() -> Note:
    """Show the four levels in one table."""
    rows = [
        (
            f"**{level.name}**",
            level.question,
            level.decided,
            f"{'✓ exists' if level.here else '○ does not exist yet'}: {level.state}",
        )
        for level in LEVELS
    ]
    return Note(table(("level", "the question", "when it is decided", "in this engine"), rows))
