"""Tell the sink what happens in the engine: the only place of the runtime that makes its events."""

from __future__ import annotations

import time
from pathlib import Path

from engine.config import EngineConfig, ModelConfig
from engine.events import RequestEvent, Sink, StartEvent, TextEvent
from engine.routing.table import RoutingTable
from engine.runtime.records import step_event
from engine.runtime.runner import StepResult
from engine.runtime.scheduler import Scheduler
from engine.runtime.sequence import Sequence


class Announcer:
    """Makes events while somebody listens; without a listener each call returns at once."""

    def __init__(self, sink: Sink, config: EngineConfig, model: ModelConfig) -> None:
        self._sink, self._config, self._model = sink, config, model

    @property
    def enabled(self) -> bool:
        """Whether somebody listens, so that steps must keep records."""
        return self._sink.enabled

    def start(self, table: RoutingTable) -> None:
        """Say that the engine is ready."""
        if not self._sink.enabled:
            return
        model = self._model
        self._sink.emit(
            StartEvent(
                model=Path(self._config.model).name,
                num_layers=model.num_layers,
                moe_layers=model.moe_layers,
                num_experts=model.num_experts,
                top_k=model.top_k,
                num_devices=self._config.num_devices,
                rank_of_phy=tuple(table.rank_of_phy.tolist()),
                table_version=table.version,
                deterministic=self._config.deterministic,
                dtype=self._config.dtype,
                time_s=time.time(),
            )
        )

    def request(self, sequence: Sequence, kind: str) -> None:
        """Say that a request was `added`, `preempted`, `finished` or `aborted`."""
        if not self._sink.enabled:
            return
        prompt = tuple(sequence.prompt_token_ids) if kind == "added" else ()
        self._sink.emit(
            RequestEvent(
                sequence.request_id,
                kind,
                sequence.label,
                time.time(),
                prompt,
                sequence.finish_reason,
            )
        )

    def text(self, sequence: Sequence, delta: str) -> None:
        """Say what a request gained."""
        if not self._sink.enabled:
            return
        self._sink.emit(
            TextEvent(
                sequence.request_id,
                sequence.label,
                delta,
                sequence.num_output,
                sequence.is_finished,
                time.time(),
            )
        )

    def step(
        self,
        number: int,
        result: StepResult,
        scheduler: Scheduler,
        started_s: float,
        duration_ms: float,
        look_ups: tuple[int, int],
    ) -> None:
        """Say what a step did; only for a step that kept records."""
        if result.records is None:
            return
        self._sink.emit(
            step_event(
                number,
                started_s,
                duration_ms,
                result,
                num_running=len(scheduler.running),
                num_waiting=len(scheduler.waiting),
                look_ups=look_ups,
            )
        )
