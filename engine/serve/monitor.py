"""What looks at the engine twice a second and keeps what was seen: ranks, table, alerts."""

from __future__ import annotations

from engine.runtime.engine import Engine
from engine.serve.alerts import Alerts, readings, with_thresholds
from engine.serve.config import ServeConfig
from engine.serve.drill import DrillHold
from engine.serve.health import Health
from engine.serve.metrics import Metrics


class Monitor:
    """Metrics, health and alerts of one service, kept together."""

    def __init__(self, config: ServeConfig, metrics: Metrics, health: Health) -> None:
        self.metrics, self.tally, self.health = metrics, metrics.tally, health
        self.drill = DrillHold(health)
        self.alerts = Alerts(with_thresholds(config.max_latency_s, config.expert_idle_minutes))

    def look(self, engine: Engine) -> None:
        """See how the engine is; on the engine's thread."""
        self.drill.look(engine)
        self.health.look(engine)
        self.tally.look(engine)
        for rank in self.tally.rank_versions.keys() - self.health.expected_ranks:
            self.tally.forget_rank(rank)
        self.alerts.check(readings(self.tally, self.health, engine.stats().num_waiting))
