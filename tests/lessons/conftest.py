"""One small engine for all lessons' tests, and what the notebooks make with it."""

from __future__ import annotations

import pytest

from workbench import lessons
from workbench.lessons.small import Run, SmallEngine

TEXT = "Der Server ist nicht erreichbar"


@pytest.fixture(scope="session")
def small() -> SmallEngine:
    return lessons.small_engine(num_devices=4)


@pytest.fixture(scope="session")
def run(small: SmallEngine) -> Run:
    return small.run(TEXT, max_tokens=4)


@pytest.fixture(scope="session")
def prompts() -> list[tuple[str, str]]:
    return lessons.mixed_prompts(4)


@pytest.fixture(scope="session")
def mixed(small: SmallEngine, prompts: list[tuple[str, str]]) -> Run:
    return small.run(prompts, max_tokens=16)


@pytest.fixture(scope="session")
def before(small: SmallEngine) -> Run:
    return small.run(TEXT, max_tokens=0)
