"""What Prometheus reads: counts and times of the service, its engine and its experts.

Names follow vLLM and SGLang where they have one. A sink on the engine's thread adds up; a scrape
reads the sums. What a machine does not have (a GPU's memory and utilisation on a CPU) is absent,
not zero.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping

import torch
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from engine.config import ModelConfig
from engine.serve.alerts import RULES, Alerts
from engine.serve.health import Health
from engine.serve.loop import Call, EngineLoop, Piece
from engine.serve.memory import resident_bytes
from engine.serve.tally import BALANCES, ServeTally

PREFIX = "tokenrouter"
MAX_EXPERT_SERIES = 2048
"""Above so many pairs of layer and expert, tokens are counted by expert over all layers."""
_LATENCIES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_STEPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """All metrics of one service, in a registry of its own."""

    def __init__(self, model: ModelConfig, tally: ServeTally) -> None:
        self.registry = CollectorRegistry()
        self.tally = tally
        self._model = model
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token", _LATENCIES
        )
        self.between_tokens = self._histogram(
            "time_per_output_token_seconds", "Between two tokens of a request", _STEPS
        )
        self.whole = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its end", _LATENCIES
        )
        self.generated = self._counter("generation_tokens", "Tokens generated")
        self.prompts = self._counter("prompt_tokens", "Prompt tokens of requests that have ended")
        self.refused = self._counter(
            "calls_refused", "Calls refused, by HTTP status or gRPC code", ["status"]
        )
        ProcessCollector(registry=self.registry)

    def watch(self, loop: EngineLoop, health: Health, alerts: Alerts) -> None:
        """Also report the state of a running engine."""
        self.registry.register(_State(loop, health, alerts, self.tally, self._model))

    def observe(self, call: Call, pieces: list[Piece]) -> None:
        """Take the times of what was just handed out; on the engine's thread."""
        now = time.monotonic()
        for piece in pieces:
            output = piece.output
            if output.token_ids:
                self.generated.inc(len(output.token_ids))
                before = call.last_s.get(piece.index)
                if before is None:
                    self.first_token.observe(now - call.started_s)
                else:
                    self.between_tokens.observe((now - before) / len(output.token_ids))
                call.last_s[piece.index] = now
            if (completion := output.completion) is not None:
                self.prompts.inc(len(completion.prompt_token_ids))
                if completion.finish_reason != "aborted":
                    self.tally.ended(now - call.started_s)
                    self.whole.observe(now - call.started_s)

    def refuse(self, outcome: str) -> None:
        """Count a call that was refused."""
        self.refused.labels(outcome).inc()

    def text(self) -> bytes:
        """Return everything in Prometheus's text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", words, registry=self.registry, buckets=buckets)

    def _counter(self, name: str, words: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(f"{PREFIX}_{name}", words, tuple(labels), registry=self.registry)


class _State(Collector):
    """Reads the state of the engine at each scrape."""

    def __init__(
        self,
        loop: EngineLoop,
        health: Health,
        alerts: Alerts,
        tally: ServeTally,
        model: ModelConfig,
    ) -> None:
        self._loop, self._health, self._alerts = loop, health, alerts
        self._tally, self._model = tally, model

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        yield from self._requests()
        yield from self._steps()
        yield from self._routing()
        yield from self._experts()
        yield from self._ranks()
        yield from _gpus()
        active = {rule.name: float(rule.name in self._alerts.active) for rule in RULES}
        yield _gauge("alert_active", "Whether a rule of the service itself holds", active, "alert")

    def _requests(self) -> Iterator[Metric]:
        stats, books = self._loop.engine.stats(), self._loop.books
        yield _gauge("num_requests_running", "Requests in the step", stats.num_running)
        waiting = max(0, books.running - stats.num_running)
        yield _gauge("num_requests_waiting", "Requests in the queue", waiting)
        used = 1 - stats.num_free_blocks / stats.num_blocks
        yield _gauge("kv_cache_usage_ratio", "Share of cache blocks in use", used)
        kept = stats.num_kept_blocks / stats.num_blocks
        yield _gauge("prefix_cache_kept_ratio", "Share of cache blocks kept for reuse", kept)
        yield _counter(
            "prefix_cache_queries", "Tokens of requests that began, looked up in the cache",
            stats.prefix_queries,
        )  # fmt: skip
        yield _counter(
            "prefix_cache_hits", "Of them, tokens that were found and not run", stats.prefix_hits
        )
        yield _counter("requests_started", "Requests let in", books.started)
        ended = {name: getattr(books, name) for name in ("finished", "aborted", "failed")}
        yield _counter("requests_ended", "Requests that ended, by how", ended, "outcome")

    def _steps(self) -> Iterator[Metric]:
        tally = self._tally
        yield from self._drafts()
        yield from self._formats()
        yield _counter("engine_steps", "Forward passes", tally.steps)
        yield _counter("step_seconds", "Time of all steps", tally.step_ms / 1e3)
        yield _counter("routing_seconds", "Time of them spent deciding", tally.deciding_ms / 1e3)
        stats = self._loop.engine.stats()
        deciding = stats.deciding
        spent = {level: ms / 1e3 for level, ms in deciding["level_ms"].items()}
        yield _counter("routing_level_seconds", "Time spent deciding, by level", spent, "level")
        looked_up = {"found": deciding["look_up_hits"], "missed": deciding["look_up_misses"]}
        yield _counter("look_ups", "Placements and orders looked up", looked_up, "outcome")
        dropped = dict(zip(self._model.moe_layers, stats.dropped_slots, strict=False))
        yield _counter(
            "dropped_slots", "Pairs of token and expert that found no room", dropped, "layer"
        )
        yield _counter("rows", "Rows run, by cause", dict(tally.rows), "cause")
        yield _counter("bad_rows", "Rows whose router logits were not finite", tally.bad_rows)
        recent = tally.recent()
        if recent.overhead_share is not None:
            yield _gauge(
                "routing_overhead_ratio", "Share of recent steps spent deciding",
                recent.overhead_share,
            )  # fmt: skip
        if recent.mean_latency_s is not None:
            yield _gauge(
                "mean_request_latency_seconds", "Mean of requests that ended recently",
                recent.mean_latency_s,
            )  # fmt: skip
        if recent.balance:
            words = "Evenness of recent rows: " + "; ".join(
                f"{name}: {formula}" for name, formula in BALANCES.items()
            )
            yield _gauge("load_balance", words, recent.balance, "definition")
        yield _gauge("rank_utilization_ratio", "Share of time at work", recent.busy_share, "rank")

    def _formats(self) -> Iterator[Metric]:
        """Yield what became of units whose number format is chosen; nothing without any."""
        told = self._tally.formats.copy()
        if not told and self._loop.engine.config.precision != "auto":
            return
        voted = {"int8": told["int8_units"], "full": told["units"] - told["int8_units"]}
        yield _counter("precision_units", "Units of rows, by the format voted", voted, "format")
        for name, words, key in (
            ("failed_units", "Units that failed their check", "failed_units"),
            ("rerun_rows", "Expert rows run again in full precision", "rerun_rows"),
            ("format_changes", "Rows of another format than the one before", "switches"),
        ):
            yield _counter(f"precision_{name}", words, told[key])

    def _drafts(self) -> Iterator[Metric]:
        """Yield what became of a draft's proposals; nothing without one. Names as in vLLM."""
        figures = self._loop.engine.stats().draft
        if figures is None:
            return
        for name, words, value in (
            ("num_draft_tokens", "Tokens a draft proposed and the model verified", "proposed"),
            ("num_accepted_tokens", "Of them, tokens that the model drew as well", "accepted"),
            ("num_passes", "Tokens a draft thought of, proposed or not", "passes"),
            ("num_steps", "Steps of the model that drew tokens, counted by request", "steps"),
        ):
            yield _counter(f"spec_decode_{name}", words, figures[value])

    def _routing(self) -> Iterator[Metric]:
        yield _gauge(
            "table_version", "Routing table in force", self._loop.engine.control.table.version
        )
        age = max(0.0, time.time() - self._health.table_since_s)
        yield _gauge("table_age_seconds", "Since it was published", age)
        yield _counter(
            "communication_errors", "Ranks lost, recoveries, tables given up",
            self._health.communication_errors,
        )  # fmt: skip

    def _experts(self) -> Iterator[Metric]:
        tokens = CounterMetricFamily(
            f"{PREFIX}_expert_tokens", "Rows of each expert", labels=("layer", "expert")
        )
        idle = GaugeMetricFamily(
            f"{PREFIX}_expert_idle_seconds",
            "From an expert's last row to the last step; long pauses of all count as a minute",
            labels=("layer", "expert"),
        )
        counts_LE, idle_LE = self._tally.counts_LE.copy(), self._tally.idle_LE()
        names = [str(layer) for layer in self._model.moe_layers]
        if counts_LE.size > MAX_EXPERT_SERIES:
            counts_LE, idle_LE = counts_LE.sum(0, keepdims=True), idle_LE.max(0, keepdims=True)
            names = ["all"]
        for layer, counts_E, idle_E in zip(names, counts_LE, idle_LE, strict=False):
            for expert, (count, seconds) in enumerate(zip(counts_E, idle_E, strict=True)):
                tokens.add_metric((layer, str(expert)), float(count))
                idle.add_metric((layer, str(expert)), float(seconds))
        yield from (tokens, idle)

    def _ranks(self) -> Iterator[Metric]:
        pids = self._health.pids or {0: os.getpid()}
        memory = {rank: resident_bytes(pid) for rank, pid in pids.items()}
        known = {rank: size for rank, size in memory.items() if size is not None}
        yield _gauge("rank_memory_bytes", "Resident memory", known, "rank")
        expected, living = self._health.expected_ranks, self._health.living_ranks
        up = {rank: float(rank in living) for rank in expected} or {0: 1.0}
        yield _gauge("rank_up", "Whether the rank lives", up, "rank")
        now, versions = self._tally.table_version, dict(self._tally.rank_versions)
        lag = {rank: now - versions[rank] for rank in expected if rank in versions}
        yield _gauge("rank_table_lag", "Tables a rank is behind the last step", lag, "rank")
        slow = self._tally.straggler()
        excess = dict.fromkeys(expected, 0.0)
        if slow is not None:
            excess[slow.rank] = slow.excess_ms / 1e3
        yield _gauge(
            "rank_excess_seconds", "What a slow rank takes beyond the others", excess, "rank"
        )


def _gpus() -> Iterator[Metric]:
    """Yield what GPUs there are; families without samples where there is none."""
    free = GaugeMetricFamily(f"{PREFIX}_gpu_memory_free_bytes", "Free memory", labels=("gpu",))
    total = GaugeMetricFamily(f"{PREFIX}_gpu_memory_total_bytes", "All memory", labels=("gpu",))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for gpu in range(torch.cuda.device_count()):
            left, whole = torch.cuda.mem_get_info(gpu)
            free.add_metric((str(gpu),), float(left))
            total.add_metric((str(gpu),), float(whole))
    yield from (free, total)


Values = float | Mapping[str, float] | Mapping[int, float]


def _gauge(name: str, words: str, values: Values, label: str = "") -> Metric:
    return _filled(GaugeMetricFamily, name, words, values, label)


def _counter(name: str, words: str, values: Values, label: str = "") -> Metric:
    return _filled(CounterMetricFamily, name, words, values, label)


def _filled(
    family: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    words: str,
    values: Values,
    label: str,
) -> Metric:
    made = family(f"{PREFIX}_{name}", words, labels=(label,) if label else ())
    for key, value in values.items() if isinstance(values, Mapping) else [("", values)]:
        made.add_metric((str(key),) if label else (), float(value))
    return made
