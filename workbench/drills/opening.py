"""Start an engine for a drill, with a session on it, and end both; hash a fresh one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError
from engine.events import Sink, Tee
from workbench import paths
from workbench.drills.proof import hashes
from workbench.drills.scenario import Scenario
from workbench.drills.session import Session
from workbench.drills.window import Discreet, Window
from workbench.lifecycle import signals_held

if TYPE_CHECKING:
    from engine import Engine

WINDOW_ROWS = 4096


@contextmanager
def opened(
    scenario: Scenario,
    *,
    model: str = paths.DEFAULT_MODEL,
    sink: Sink | None = None,
    **options: Any,
) -> Iterator[Session]:
    """Start an engine for a drill and close it after; the drill is restored however this ends.

    Args:
        scenario: the drill.
        model: folder or name of the model.
        sink: who else listens to the engine, such as its telemetry.
        options: of `Session`.

    Raises:
        CheckpointError: the model folder is missing or damaged.
        ConfigError: the model has no experts.
    """
    window = Window(max_rows=WINDOW_ROWS)
    sinks = [window] if sink is None else [window, sink]
    with closing(_engine(scenario, model, Discreet(Tee(sinks)))) as engine:
        if not engine.model_config.is_moe:
            raise ConfigError(f"model ({model}) is dense; a drill needs one with experts.")
        session = Session(scenario, engine, window, **options)
        try:
            yield session
        finally:
            session.finish("broken off", graded=False)


def fresh_hashes(scenario: Scenario, model: str) -> dict[str, str]:
    """Start an engine as a drill would and return its hashes, by `proof.hashes`.

    Raises:
        CheckpointError: the model folder is missing or damaged.
    """
    with closing(_engine(scenario, model, None)) as engine:
        return hashes(engine)


def _engine(scenario: Scenario, model: str, sink: Sink | None) -> Engine:
    with signals_held():
        from engine import Engine, EngineConfig

    config = EngineConfig(
        model=paths.model_folder(model),
        num_devices=scenario.needs["devices"],
        num_blocks=1024,
        num_threads=1,
        drill=True,
    )
    return Engine(config, sink=sink)
