"""Turns a run of events into what a screen shows: one frame, whenever it is asked for.

Works on the events' own times and on the time it is given, so that a live stream and a replayed
trace give the same frames. Holds a bounded amount: the steps of the last seconds, the requests that
run or have just ended, and one count per domain, layer and expert.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.events import (
    CAUSES,
    LEVELS,
    ROUTING_STAGES,
    STAGES,
    ControlEvent,
    Event,
    RankEvent,
    RequestEvent,
    StartEvent,
    StepEvent,
    TextEvent,
)
from engine.runtime.telemetry.wire import Kind, Message

RATE_WINDOW_S = 2.0
"""Rates are counts over this many seconds."""
STEP_WINDOW_S = 5.0
"""Latency, stage times and overhead are taken over the steps of this many seconds."""
SMOOTHING_S = 3.0
"""Time constant of the smoothed counts: a step this old weighs 1/e of a new one."""
LINGER_S = 3.0
"""How long a finished request stays on the list."""
MAX_DOMAINS = 32
MAX_REQUESTS = 32
"""Most requests in one frame; `num_requests` says how many there are."""
MAX_TEXT = 400
"""Characters kept of a request's text, from its end."""
MAX_PROMPT = 240
_MAX_STEPS = 8192

Int64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Request:
    """A request as the screen shows it."""

    id: int
    label: str
    added_s: float
    prompt: str
    text: str = ""
    num_tokens: int = 0
    state: str = "running"
    ended_s: float = math.inf


@dataclass(frozen=True, slots=True)
class _Step:
    """What is kept of a step for the windows."""

    end_s: float
    duration_ms: float
    num_rows: int
    stage_ms: tuple[float, ...]


class Aggregator:
    """Adds up events; `frame` reads the sums. Not thread-safe: one thread owns it."""

    _first_s: float
    _framed: Int64
    """(L, E) rows counted up to the last frame, over all domains."""

    def __init__(self, prompt_text: Callable[[Sequence[int]], str] | None = None) -> None:
        self.prompt_text = prompt_text
        """Turns a prompt's ids into text; None shows no prompts."""
        self._reset(None)

    def add(self, events: Iterable[Event]) -> None:
        """Take a run of events, oldest first."""
        steps: list[StepEvent] = []
        for event in events:
            self._first_s = min(self._first_s, event.time_s)
            if isinstance(event, TextEvent):
                self._on_text(event)
            elif isinstance(event, StepEvent):
                steps.append(event)
                self._on_step(event)
            elif isinstance(event, RequestEvent):
                self._on_request(event)
            elif isinstance(event, StartEvent):
                self._reset(event)
                steps.clear()
            elif isinstance(event, ControlEvent):
                self._on_control(event)
        if steps:
            self._count(steps)

    def frame(self, seq: int, now_s: float) -> Message:
        """Return the state of things at `now_s`, and begin the next `counts`.

        Arrays, with G domains: `counts` (L, E) int32 routed rows since the last frame, `total`
        (G, L, E) int64 since the start, `smoothed` (G, L, E) float32 exponentially forgotten.
        A viewer that missed frames takes differences of `total`.
        """
        self._forget(now_s)
        arrays: dict[str, npt.NDArray[Any]] = {}
        if self._start is not None:
            counted = self._total.sum(axis=0)
            arrays = {
                "counts": (counted - self._framed).astype("<i4"),
                "total": self._total.astype("<i8"),
                "smoothed": self._smoothed.astype("<f4"),
            }
            self._framed = counted
        return Message(Kind.FRAME, seq, now_s, self._meta(now_s), arrays)

    def _reset(self, start: StartEvent | None) -> None:
        """Begin anew: what was counted so far belongs to another engine."""
        self._start = start
        self._domains: list[str] = []
        self._domain_of: dict[int, int] = {}
        self._requests: dict[int, _Request] = {}
        self._steps: deque[_Step] = deque(maxlen=_MAX_STEPS)
        self._tokens: deque[tuple[float, int]] = deque(maxlen=_MAX_STEPS)
        self._controls: deque[dict[str, Any]] = deque(maxlen=8)
        self._totals: Counter[str] = Counter()
        self._extra_rows: Counter[str] = Counter()
        self._last: StepEvent | None = None
        self._last_end_s = -math.inf
        self._first_s = start.time_s if start else math.inf
        self._table_version = start.table_version if start else 0
        self._frame_s = -math.inf
        layers, experts = (len(start.moe_layers), start.num_experts) if start else (0, 0)
        self._total: Int64 = np.zeros((0, layers, experts), np.int64)
        self._smoothed = self._total.astype(np.float32)
        self._framed = np.zeros((layers, experts), np.int64)

    # ---- one method per kind of event

    def _on_request(self, event: RequestEvent) -> None:
        if event.kind == "added":
            prompt = ""
            if self.prompt_text is not None and event.prompt_token_ids:
                prompt = self.prompt_text(event.prompt_token_ids)[-MAX_PROMPT:]
            self._domain_of[event.request_id] = self._domain(event.label)
            self._requests[event.request_id] = _Request(
                event.request_id, event.label, event.time_s, prompt
            )
            return
        self._totals[event.kind] += 1
        request = self._requests.get(event.request_id)
        if request is not None and event.kind in ("finished", "aborted"):
            request.state = event.finish_reason or event.kind
            request.ended_s = event.time_s

    def _on_text(self, event: TextEvent) -> None:
        request = self._requests.get(event.request_id)
        if request is None:
            return
        fresh = event.num_tokens - request.num_tokens
        if fresh > 0:
            self._tokens.append((event.time_s, fresh))
            self._totals["generated"] += fresh
            request.num_tokens = event.num_tokens
        if event.delta:
            request.text = (request.text + event.delta)[-MAX_TEXT:]

    def _on_step(self, event: StepEvent) -> None:
        end_s = event.time_s + event.duration_ms / 1000.0
        stages = tuple(event.stage_ms.get(stage, 0.0) for stage in STAGES)
        self._steps.append(_Step(end_s, event.duration_ms, event.num_rows, stages))
        self._totals["steps"] += 1
        self._totals["rows"] += event.num_rows
        self._totals["bad_rows"] += event.bad_rows
        self._last, self._last_end_s = event, end_s
        self._table_version = event.table_version
        for cause, count in enumerate(np.bincount(event.causes, minlength=1).tolist()):
            if cause and count:
                self._extra_rows[CAUSES[cause]] += count

    def _on_control(self, event: ControlEvent) -> None:
        self._table_version = event.table_version
        self._controls.append(
            {"action": event.action, "table_version": event.table_version, "time_s": event.time_s}
        )

    # ---- counts

    def _domain(self, label: str) -> int:
        """Return the label's place on the G axis, making room for a new one."""
        label = label or "unlabelled"
        if label not in self._domains:
            if len(self._domains) >= MAX_DOMAINS:
                return MAX_DOMAINS - 1
            full = len(self._domains) == MAX_DOMAINS - 1
            self._domains.append("other" if full else label)
            row = ((0, 1), (0, 0), (0, 0))
            self._total = np.pad(self._total, row)
            self._smoothed = np.pad(self._smoothed, row)
            return len(self._domains) - 1
        return self._domains.index(label)

    def _count(self, steps: list[StepEvent]) -> None:
        """Count rows by domain, layer and expert over several steps in one pass."""
        request_ids = np.concatenate([step.request_ids for step in steps])
        if self._start is None or not self._total.shape[1] or not len(request_ids):
            return
        unknown = -1
        unique, inverse = np.unique(request_ids, return_inverse=True)
        for request_id in unique.tolist():
            if request_id not in self._domain_of:
                unknown = self._domain("")
        domain_T = np.array(
            [self._domain_of.get(request_id, unknown) for request_id in unique.tolist()]
        )[inverse]
        ids_TLK = np.concatenate([step.topk_ids for step in steps]).astype(np.int64)
        domains, layers, experts = self._total.shape
        base_TL = domain_T[:, None] * layers + np.arange(layers)
        flat = (base_TL[:, :, None] * experts + ids_TLK)[(ids_TLK >= 0) & (ids_TLK < experts)]
        counted = np.bincount(flat, minlength=domains * layers * experts)
        self._total += counted.reshape(self._total.shape)
        self._smoothed += counted.reshape(self._total.shape)

    def _forget(self, now_s: float) -> None:
        """Let old things go: smoothed counts fade, windows slide, ended requests leave."""
        if math.isfinite(self._frame_s):
            elapsed_s = max(0.0, now_s - self._frame_s)
            self._smoothed *= math.exp(-elapsed_s / SMOOTHING_S)
        self._frame_s = now_s
        while self._steps and self._steps[0].end_s < now_s - STEP_WINDOW_S:
            self._steps.popleft()
        while self._tokens and self._tokens[0][0] < now_s - RATE_WINDOW_S:
            self._tokens.popleft()
        gone = [r.id for r in self._requests.values() if r.ended_s < now_s - LINGER_S]
        for request_id in gone:
            del self._requests[request_id]
            self._domain_of.pop(request_id, None)

    # ---- the JSON part

    def _meta(self, now_s: float) -> dict[str, Any]:
        last = self._last
        window_s = max(0.1, min(RATE_WINDOW_S, now_s - self._first_s))
        recent = [step for step in self._steps if step.end_s > now_s - RATE_WINDOW_S]
        return {
            "engine": asdict(self._start) if self._start else None,
            "label": "measured",
            "table_version": self._table_version,
            "step": last.step if last else None,
            "ranks": [_rank(rank) for rank in last.ranks] if last else [],
            "idle_s": max(0.0, now_s - self._last_end_s) if last else None,
            "num_running": last.num_running if last else 0,
            "num_waiting": last.num_waiting if last else 0,
            "generated_per_s": sum(count for _, count in self._tokens) / window_s,
            "rows_per_s": sum(step.num_rows for step in recent) / window_s,
            "steps_per_s": len(recent) / window_s,
            **self._times(),
            "totals": {name: self._totals[name] for name in TOTALS},
            "extra_rows": dict(self._extra_rows),
            "domains": list(self._domains),
            "requests": self._listing(now_s),
            "num_requests": len(self._requests),
            "controls": list(self._controls),
            "facts": {},
            "looking": None,
        }

    def _times(self) -> dict[str, Any]:
        """Return latency, stage times and overhead over the step window; None without steps."""
        if not self._steps:
            return {"step_p50_ms": None, "step_p95_ms": None, "overhead_share": None,
                    "level_share": {}, "rows_per_step": None, "stage_ms": {}}  # fmt: skip
        durations = np.array([step.duration_ms for step in self._steps])
        stages = np.array([step.stage_ms for step in self._steps])
        p50, p95 = np.percentile(durations, (50, 95)).tolist()
        spent = dict(zip(STAGES, stages.sum(axis=0).tolist(), strict=True))
        deciding = sum(spent[stage] for stage in ROUTING_STAGES)
        whole = float(durations.sum())
        return {
            "step_p50_ms": p50,
            "step_p95_ms": p95,
            "overhead_share": deciding / whole if whole > 0 else 0.0,
            "level_share": {
                level: sum(spent[stage] for stage in own) / whole if whole > 0 else 0.0
                for level, own in LEVELS.items()
            },
            "rows_per_step": sum(step.num_rows for step in self._steps) / len(self._steps),
            "stage_ms": dict(zip(STAGES, stages.mean(axis=0).tolist(), strict=True)),
        }

    def _listing(self, now_s: float) -> list[dict[str, Any]]:
        return [
            {
                "id": request.id,
                "label": request.label,
                "state": request.state,
                "num_tokens": request.num_tokens,
                "age_s": max(0.0, now_s - request.added_s),
                "prompt": request.prompt,
                "text": request.text,
            }
            for request in islice(self._requests.values(), MAX_REQUESTS)
        ]


def _rank(rank: RankEvent) -> dict[str, Any]:
    """Return one rank's part of the last step; counts are sums over destinations."""
    return {
        "rank": rank.rank,
        "mode": rank.mode,
        "rows": int(rank.rows.sum()),
        "num_bytes": int(rank.num_bytes.sum()),
        "messages": int(rank.messages.sum()),
        "wait_ms": rank.wait_ms,
        "transfer_ms": rank.transfer_ms,
        "busy_ms": rank.busy_ms,
    }


TOTALS = ("steps", "rows", "generated", "bad_rows", "finished", "aborted", "preempted")
"""What `totals` counts since the engine started."""
