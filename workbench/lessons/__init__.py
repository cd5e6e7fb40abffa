"""What the notebooks call: the environment check, a small engine, exhibits, exercises.

    from workbench import lessons

    lessons.check_environment()
    small = lessons.small_engine()
    run = small.run("Der Server ist", max_tokens=12)
    lessons.stepper(run)
    lessons.check("first step", answer, run)

Names load on first use, so that the environment check can say what is missing instead of failing
over it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.lessons.ban import ban_effect
    from workbench.lessons.drill_desk import drill, drill_reference
    from workbench.lessons.environment import check_environment
    from workbench.lessons.exercises import check, solution
    from workbench.lessons.exhibits import domain_map, figure, live_map, load_map, stepper
    from workbench.lessons.four_levels import levels
    from workbench.lessons.live_engine import Live, live
    from workbench.lessons.note import Note
    from workbench.lessons.quality import surprise
    from workbench.lessons.shuffle import shuffle_domains
    from workbench.lessons.small import Run, SmallEngine, mixed_prompts, small_engine
    from workbench.lessons.way import seven_lines

_HOMES = {
    "Live": "live_engine",
    "Note": "note",
    "Run": "small",
    "SmallEngine": "small",
    "ban_effect": "ban",
    "check": "exercises",
    "check_environment": "environment",
    "drill": "drill_desk",
    "drill_reference": "drill_desk",
    "domain_map": "exhibits",
    "figure": "exhibits",
    "levels": "four_levels",
    "live": "live_engine",
    "live_map": "exhibits",
    "load_map": "exhibits",
    "mixed_prompts": "small",
    "seven_lines": "way",
    "shuffle_domains": "shuffle",
    "small_engine": "small",
    "solution": "exercises",
    "stepper": "exhibits",
    "surprise": "quality",
}
__all__ = [
    "Live",
    "Note",
    "Run",
    "SmallEngine",
    "ban_effect",
    "check",
    "check_environment",
    "drill",
    "drill_reference",
    "domain_map",
    "figure",
    "levels",
    "live",
    "live_map",
    "load_map",
    "mixed_prompts",
    "seven_lines",
    "shuffle_domains",
    "small_engine",
    "solution",
    "stepper",
    "surprise",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'workbench.lessons' has no attribute {name!r}")
    return getattr(import_module(f"workbench.lessons.{_HOMES[name]}"), name)
