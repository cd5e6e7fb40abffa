"""Start an engine for a drill, with a session on it, and end both; hash a fresh one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from engine.errors import ConfigError
from engine.events import Filtered, Sink, Tee
from workbench import paths
from workbench.drills.deployment import Deployment, Extent
from workbench.drills.jobs import job
from workbench.drills.proof import hashes
from workbench.drills.scenario import Scenario
from workbench.drills.session import Session
from workbench.drills.window import Window, discreet

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
    with closing(deployment_of(scenario, model, Filtered(Tee(sinks), discreet))) as deployment:
        deployment.open()
        if not deployment.require().model_config.is_moe:
            raise ConfigError(f"model ({model}) is dense; a drill needs one with experts.")
        session = Session(scenario, deployment, window, **options)
        try:
            yield session
        finally:
            session.finish("broken off", graded=False)


def fresh_hashes(scenario: Scenario, model: str) -> dict[str, str]:
    """Start an engine as a drill would and return its hashes, by `proof.hashes`.

    Raises:
        CheckpointError: the model folder is missing or damaged.
    """
    with closing(deployment_of(scenario, model)) as deployment:
        deployment.open()
        return hashes(deployment)


def deployment_of(scenario: Scenario, model: str, sink: Sink | None = None) -> Deployment:
    """Return what the drill deploys; nothing is started yet.

    Raises:
        CheckpointError: the model folder is missing.
        ConfigError: an option or a job is not valid.
    """
    needs, deployed = scenario.needs, scenario.deployed
    size = {"num_ranks": needs["ranks"]} if "ranks" in needs else {"num_devices": needs["devices"]}
    extent = Extent(
        options={**size, **deployed.options},
        files=deployed.files,
        jobs=[job(raw) for raw in deployed.jobs],
        instances=deployed.instances,
    )
    return Deployment(extent, paths.model_folder(model), sink)
