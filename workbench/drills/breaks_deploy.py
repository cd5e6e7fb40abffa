"""Faults of a deployment: wrong options, damaged files, jobs that died or misbehave, other load."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import ConfigError
from workbench.drills.deployment import PROCESS
from workbench.drills.evidence import pad_token
from workbench.drills.injector import Target, action
from workbench.drills.jobs import Auditor
from workbench.drills.screens import Screens
from workbench.drills.weights_file import WEIGHTS, rename

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.trace.schema import Array

THRESHOLDS = "precision.json"


@action
def deploy(target: Target, options: Mapping[str, Any], instance: int = 0) -> None:
    """Start the engine again with other options, as somebody's change to its deployment would."""
    target.deployment.restart(instance, **options)


@action
def set_policy(target: Target, smoothing: float) -> None:
    """Leave smoothing switched on."""
    target.control.set_smoothing(smoothing)


@action
def load(target: Target, running: int | None = None, domain: str | None = None) -> None:
    """Ask other things of the engine: more at a time, or of one domain."""
    target.choose_traffic(running=running, domain=domain)


@action
def write_model(target: Target, key: str, value: Any) -> None:
    """Deliver a model whose config.json says something else, and start the engine with it."""
    target.deployment.write_model(key, value)
    target.deployment.restart()


@action
def write_precision(
    target: Target, unit_rows: int | None = None, range_by: float | None = None
) -> None:
    """Deliver thresholds for number formats that do not fit, and start the engine with them.

    Args:
        target: its engine chooses formats.
        unit_rows: rows that share a format.
        range_by: factor on the largest magnitude that each layer's check allows.
    """
    path = target.deployment.folder / THRESHOLDS
    content = json.loads(path.read_text("utf-8"))
    if unit_rows is not None:
        content["unit_rows"] = unit_rows
    for layer in content["layers"] if range_by is not None else ():
        layer["check"]["max_range"] *= range_by
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    target.deployment.restart()


@action
def rerun_whole_batch(target: Target, every: int) -> None:
    """Let one wrong prediction, in every so many layers, cost the whole batch and not its unit."""
    calls = itertools.count(1)

    def fault(failed_U: Array) -> Array:
        wrong = failed_U.any() or next(calls) % every == 0
        return np.full_like(failed_U, wrong)

    target.inject("precision.check", fault)


@action
def flip_byte(target: Target) -> None:
    """Damage one byte of the weights, somewhere in the tensors, and start the engine with it."""
    path = target.deployment.folder / WEIGHTS
    content = bytearray(path.read_bytes())
    content[int(target.rng.integers(len(content) // 2, len(content)))] ^= 0x40
    path.write_bytes(content)
    target.deployment.restart()


@action
def rename_tensor(target: Target, old: str, new: str) -> None:
    """Deliver weights in which a tensor has another name, and start the engine with them."""
    deployment = target.deployment
    rename(deployment.folder / WEIGHTS, old, new)
    deployment.note_in_manifest(WEIGHTS)
    deployment.restart()


@action
def stop_job(target: Target, name: str) -> None:
    """Let a job that belongs beside the engine die without a word."""
    target.deployment.jobs[name].stop()


@action
def hang_job(target: Target, name: str) -> None:
    """Let a job that belongs beside the engine hang: its process lives and does nothing."""
    target.deployment.jobs[name].hung = True


@action
def crowd(target: Target, name: str, viewers: int) -> None:
    """Let many more viewers connect that never say what they have drawn."""
    job = target.deployment.jobs[name]
    assert isinstance(job, Screens), f"{name} is no wall of screens"
    job.gather(viewers)

    def heal() -> None:
        job.stop()
        job.start(target.deployment)

    target.deployment.undo_with(heal)


@action
def ready_by_process(target: Target) -> None:
    """Let the gateway take an instance for ready as soon as its process lives."""
    target.deployment.ready_by = PROCESS


@action
def hold_lock(target: Target, name: str, hold_ms: float, pause_ms: float) -> None:
    """Let an auditor hold the lock that every routing decision takes."""
    job = target.deployment.jobs[name]
    assert isinstance(job, Auditor), f"{name} is no auditor"
    before = job.hold_s, job.pause_s
    job.hold_s, job.pause_s = hold_ms / 1e3, pause_ms / 1e3

    def heal() -> None:
        job.hold_s, job.pause_s = before

    target.deployment.undo_with(heal)
    target.inject("gate.lock", partial(_take, job.lock))


@action
def poison_guest(target: Target) -> None:
    """Let the vector of the padding token, which only the guest's client sends, be no numbers."""
    token = pad_token(target.deployment.require())

    def fault(given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        token_ids_T, x_TD = given
        return token_ids_T, x_TD.masked_fill((token_ids_T == token)[:, None], float("nan"))

    target.inject("embed.rows", fault)


@action
def misfit_draft(target: Target, shift: int) -> None:
    """Let the draft propose as one that was trained for other weights: its logits are shifted."""

    def fault(logits_BV: Tensor) -> Tensor:
        return logits_BV.roll(shift, -1)

    target.inject("draft.propose", fault)


@action
def noise(target: Target, instance: int, size: float) -> None:
    """Leave noise on the logits of one instance, as a process in training mode would have it."""
    import torch

    other = target.deployment.others[instance - 1]
    if other is None:
        raise ConfigError(f"instance {instance} does not run.")
    generator = torch.Generator().manual_seed(int(target.rng.integers(2**31)))

    def fault(logits_BV: Tensor) -> Tensor:
        return logits_BV + size * torch.randn(logits_BV.shape, generator=generator)

    other.control.inject("sampler.noise", fault, target.lease_s)


def _take(lock: Any, value: None) -> None:
    with lock:
        return
