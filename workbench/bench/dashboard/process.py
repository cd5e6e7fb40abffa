"""The watched engine: a process of its own on one core that runs, listens and measures itself.

`python -m workbench.bench.dashboard.process` reads JSON lines from standard input. The first says
what to be, each further one is a question and gets one JSON line as its answer:

    {"key", "core", "parent", "model", "running", "shape"}    be this; answer {"address", "pid"}
    {"do": "measure", "seconds"}         what the steps of so long took
    {"do": "turns", "seconds", "turn_s"} the same with the stream shut and open in turn
    {"do": "stream", "on"}               hand events to the stream, or do not
    {"do": "extra", "kind"}              one request more: none, plain or watched

Without a model the engine is invented: events of the given shape, as fast as one of that kind might
give them. It ends with its standard input, or with its parent.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import statistics
import sys
import threading
import time
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol

from engine.events import Event, RequestEvent, StepEvent, Tee, TextEvent
from engine.runtime.telemetry import Telemetry
from workbench.desk import Desk
from workbench.lifecycle import end_with_parent

EXTRAS = ("none", "plain", "watched")
EXTRA_TOKENS = 64
"""New tokens of an extra request: with its prompt, no more than are recorded."""
LONG = 1.5
"""Steps longer than so many medians were stolen: no stage of theirs is slower than the others."""
INVENTED_STEP_S = 0.02
INVENTED_DOMAINS = 8


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn of the loop: a step, and before it what the desk was asked by those who look."""

    ms: float
    desk_ms: float
    rows: int
    prefill_rows: int
    new_tokens: int
    watched: bool


class Work(Protocol):
    """What the loop turns."""

    valve: Valve

    def step(self) -> Sample:
        """Run one step and what the loop does around it."""

    def extra(self, kind: str) -> int:
        """Keep one request more; return how many rows a step then has."""


class Valve:
    """A sink that can be shut: what is behind it costs nothing then."""

    def __init__(self, behind: Telemetry) -> None:
        self._behind = behind
        self.enabled = True

    def emit(self, event: Event) -> None:
        """Pass the event on."""
        self._behind.emit(event)


class Note:
    """A sink that keeps the last step's counts and the tokens made since it was asked."""

    enabled = True

    def __init__(self) -> None:
        self.rows = self.prefill_rows = self.new_tokens = 0
        self.watched = False

    def emit(self, event: Event) -> None:
        """Note what counts."""
        if isinstance(event, StepEvent):
            self.rows, self.prefill_rows = event.num_rows, event.num_prefill_rows
            self.watched = bool(event.decisions)
        elif isinstance(event, TextEvent):
            self.new_tokens += 1

    def sample(self, ms: float, desk_ms: float = 0.0) -> Sample:
        """Return the last step and begin to count tokens anew."""
        tokens, self.new_tokens = self.new_tokens, 0
        return Sample(ms, desk_ms, self.rows, self.prefill_rows, tokens, self.watched)


class RealWork:
    """The engine of `workbench start` on its mixed traffic, one thread for a product."""

    def __init__(self, model: str, running: int, telemetry: Telemetry, desk: Desk) -> None:
        from engine import Engine, EngineConfig
        from workbench.actions import serve_actions
        from workbench.traffic import Traffic, corpus_prompts
        from workbench.window import Window

        window, self.note, self.valve = Window(), Note(), Valve(telemetry)
        config = EngineConfig(model=model, num_devices=4, num_threads=1)
        self.engine = Engine(config, sink=Tee((self.valve, window, self.note)))
        telemetry.show_prompts(self.engine.tokenizer.decode)
        self._prompts = corpus_prompts()
        self.traffic = Traffic(self._prompts, running)
        self._desk, self._running = desk, running
        self._kind, self._extra, self._added = EXTRAS[0], -1, 0
        serve_actions(desk, self.engine, self.traffic, telemetry, window)

    def step(self) -> Sample:
        """Run one turn of the loop of `workbench start`."""
        began = time.perf_counter()
        self._desk.serve(0.0)
        served = time.perf_counter()
        self.traffic.fill(self.engine)
        outputs = self.engine.step()
        self.traffic.settle(outputs)
        ended = time.perf_counter()
        if any(output.request_id == self._extra and output.finished for output in outputs):
            self._add()
        return self.note.sample(1e3 * (ended - served), 1e3 * (served - began))

    def extra(self, kind: str) -> int:
        """Keep one request more, watched or not."""
        before, self._extra, self._kind = self._extra, -1, kind
        if before >= 0:
            self.engine.abort(before)
        self._add()
        return self._running + (kind != EXTRAS[0])

    def _add(self) -> None:
        """Add the next extra request; watched or not, they are the same."""
        from engine import SamplingParams
        from workbench.traffic import WATCHED_TOKENS

        if self._kind == EXTRAS[0]:
            return
        prompt = self._prompts[self._added % len(self._prompts)]
        self._added += 1
        params = SamplingParams(
            max_tokens=EXTRA_TOKENS, temperature=0.8, seed=self._added, ignore_eos=True
        )
        length = len(self.engine.tokenizer.encode(prompt.text)) + EXTRA_TOKENS
        positions = range(min(WATCHED_TOKENS, length)) if self._kind == EXTRAS[2] else ()
        self._extra = self.engine.add(prompt.text, params, label=prompt.domain, watch=positions)


class InventedWork:
    """Events of any shape without a model, one step every `INVENTED_STEP_S`."""

    def __init__(self, shape: list[int], running: int, telemetry: Telemetry) -> None:
        from workbench.trace.synthetic import start_event, step_event

        layers, experts, top_k = shape
        start = start_event(layers=layers, experts=experts, top_k=top_k)
        self.note, self.valve = Note(), Valve(telemetry)
        self._sink, self._running, self._step = Tee((self.valve, self.note)), running, 0
        self._events = [step_event(start, step, running) for step in range(16)]
        now = time.time()
        self._sink.emit(replace(start, time_s=now))
        for request in range(running):
            label = f"domain {request % INVENTED_DOMAINS}"
            self._sink.emit(RequestEvent(request, "added", label, now, prompt_token_ids=(1,)))

    def step(self) -> Sample:
        """Say one step, then wait for the next."""
        began, now = time.perf_counter(), time.time()
        event = self._events[self._step % len(self._events)]
        self._step += 1
        self._sink.emit(replace(event, time_s=now, step=self._step))
        for request in range(self._running):
            self._sink.emit(TextEvent(request, "", "word ", self._step, False, now))
        time.sleep(max(0.0, INVENTED_STEP_S - (time.perf_counter() - began)))
        return self.note.sample(1e3 * (time.perf_counter() - began))

    def extra(self, kind: str) -> int:
        """Change nothing: an invented engine has no requests to add."""
        return self._running


def main() -> None:
    """Be the process; returns when standard input has ended."""
    asked: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    be = json.loads(sys.stdin.readline())
    if be["core"] is not None:
        os.sched_setaffinity(0, {be["core"]})
    end_with_parent(be["parent"], watch_stdin=False)
    threading.Thread(target=_read, args=(asked,), name="questions", daemon=True).start()
    with closing(Desk()) as desk:
        telemetry = Telemetry(key=bytes.fromhex(be["key"]), on_control=desk.take)
        with closing(telemetry):
            work: Work = (
                RealWork(be["model"], be["running"], telemetry, desk)
                if be["model"]
                else InventedWork(be["shape"], be["running"], telemetry)
            )
            _answer({"address": telemetry.address, "pid": os.getpid()})
            _serve(work, telemetry, asked, be["running"])


def _serve(
    work: Work,
    telemetry: Telemetry,
    asked: queue.SimpleQueue[dict[str, Any] | None],
    rows: int,
) -> None:
    """Step until there are no more questions; answer those that come."""
    while True:
        work.step()
        try:
            question = asked.get_nowait()
        except queue.Empty:
            continue
        match question:
            case None:
                return
            case {"do": "measure", "seconds": seconds}:
                _answer(_measure(work, telemetry, seconds, rows))
            case {"do": "turns", "seconds": seconds, "turn_s": turn_s}:
                _answer(_turns(work, telemetry, seconds, turn_s, rows))
            case {"do": "stream", "on": on}:
                work.valve.enabled = on
                _answer({})
            case {"do": "extra", "kind": kind}:
                rows = work.extra(kind)
                _answer({})


def _measure(work: Work, telemetry: Telemetry, seconds: float, rows: int) -> dict[str, Any]:
    """Turn the loop for `seconds`; return rates, and the time of steps of the same size."""
    gc.collect()
    samples: list[Sample] = []
    seq = telemetry.latest.seq if telemetry.latest else 0
    began = time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        samples.append(work.step())
    alike = _alike(samples, rows)
    watched = [_whole(sample) for sample in alike if sample.watched]
    return {
        "seconds": spent,
        "tokens_per_s": sum(sample.new_tokens for sample in samples) / spent,
        "steps": len(alike),
        "ms": statistics.fmean(map(_whole, alike)) if alike else None,
        "watched_steps": len(watched),
        "watched_ms": statistics.fmean(watched) if watched else None,
        "frames_per_s": ((telemetry.latest.seq if telemetry.latest else 0) - seq) / spent,
        "viewers": telemetry.num_viewers,
    }


def _turns(
    work: Work, telemetry: Telemetry, seconds: float, turn_s: float, rows: int
) -> dict[str, Any]:
    """Turn the loop for `seconds` with the stream shut and open in turn, so long each.

    What the machine does beside us falls on both. A shut turn has the step alone; an open one has
    also what the desk was asked, which goes on in both. Steps a shared machine was taken away from
    are left out and counted: `long_steps`, shut and open.
    """
    gc.collect()
    turns: list[tuple[list[float], list[float]]] = []
    tokens, threads_s, open_s = 0, 0.0, 0.0
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        both: list[list[float]] = []
        for is_open in (False, True):
            work.valve.enabled = is_open
            samples: list[Sample] = []
            turn, thread, process = time.perf_counter(), time.thread_time(), time.process_time()
            while time.perf_counter() - turn < turn_s:
                samples.append(work.step())
            if is_open:
                open_s += time.perf_counter() - turn
                tokens += sum(sample.new_tokens for sample in samples)
                threads_s += time.process_time() - process - (time.thread_time() - thread)
            both.append([_whole(one) if is_open else one.ms for one in _alike(samples, rows)])
        turns.append((both[0], both[1]))
    pairs, long_steps = _pairs(turns)
    return {
        "pairs": pairs,
        "long_steps": long_steps,
        "tokens_per_s": tokens / open_s,
        "other_threads": threads_s / open_s,
        "viewers": telemetry.num_viewers,
    }


def _pairs(
    turns: list[tuple[list[float], list[float]]],
) -> tuple[list[tuple[float, float]], tuple[int, int]]:
    """Return the mean step of each shut and open turn, and how many long steps were left out."""
    limits = [
        LONG * statistics.median(steps) if (steps := list(chain(*side))) else 0.0
        for side in zip(*turns, strict=True)
    ]
    pairs, left_out = [], [0, 0]
    for turn in turns:
        kept = []
        for side, (steps, limit) in enumerate(zip(turn, limits, strict=True)):
            usual = [ms for ms in steps if ms <= limit]
            left_out[side] += len(steps) - len(usual)
            kept.append(usual)
        if kept[0] and kept[1]:
            pairs.append((statistics.fmean(kept[0]), statistics.fmean(kept[1])))
    return pairs, (left_out[0], left_out[1])


def _alike(samples: list[Sample], rows: int) -> list[Sample]:
    """Return the steps of exactly `rows` rows, none of a prompt.

    So what differs between two measurements is not what the traffic happened to be.
    """
    return [sample for sample in samples if sample.rows == rows and not sample.prefill_rows]


def _whole(sample: Sample) -> float:
    return sample.ms + sample.desk_ms


def _read(asked: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    for line in sys.stdin:
        asked.put(json.loads(line))
    asked.put(None)


def _answer(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
