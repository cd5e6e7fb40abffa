"""The engine: requests in, tokens out, one step at a time.

    engine = Engine(EngineConfig(model="data/models/polyglot-moe"))
    print(engine.generate(["12 * 7 = "], SamplingParams(max_tokens=8))[0].text)

One process, one model, N logical devices. `step` is called by one thread; `add`, `abort` and
`control` may be called from others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np
import torch

from engine.checkpoint.load import check_fit, read_config
from engine.cluster.devices import check_devices
from engine.cluster.rank import Rank, target_of
from engine.config import EngineConfig, ModelConfig, SamplingParams
from engine.errors import RequestError, RoutingError
from engine.events import NullSink, Sink
from engine.faults import Faults
from engine.kernels.registry import bind
from engine.model.moe import MoE
from engine.model.ranges import give_ranges
from engine.model.step import StageClock
from engine.model.transformer import Transformer
from engine.routing.survivors import Roles
from engine.routing.table import RoutingTable
from engine.runtime import books
from engine.runtime.admission import Admission
from engine.runtime.announcer import Announcer
from engine.runtime.computing import computing
from engine.runtime.control import Control
from engine.runtime.crew import Crew
from engine.runtime.deciding import Deciding
from engine.runtime.door import Door
from engine.runtime.draft.drafter import Drafter
from engine.runtime.draft.load import check_draft, open_drafter
from engine.runtime.outbox import Outbox
from engine.runtime.results import Completion, EngineStats, RequestOutput
from engine.runtime.runner import Runner, Terms
from engine.runtime.scheduler import Scheduler
from engine.runtime.sequence import Sequence
from engine.runtime.start import max_model_len, own_rank, routing, tokenizer_of

__all__ = ["Completion", "Engine", "EngineStats", "RequestOutput"]


class Engine:
    """Runs requests through a model by continuous batching."""

    _runner: Runner | Crew
    _drafter: Drafter | None = None

    def __init__(
        self, config: EngineConfig, *, sink: Sink | None = None, faults: Faults | None = None
    ) -> None:
        """Load the model and make ready.

        Args:
            config: what to run and how.
            sink: who listens to events; None listens to nothing and costs nothing.
            faults: fault points to share with a drill that sets `weights.load` before the start.

        Raises:
            CheckpointError: the model folder is missing, damaged or does not fit its config.
            ConfigError: an option does not fit the model.
            MachineError: the KV cache asks for more memory than there is, or ranks for more GPUs.
        """
        if config.num_ranks > 1:
            config = replace(config, num_devices=config.num_ranks)
        self.config = config
        self.sink: Sink = sink or NullSink()
        self.faults = faults or Faults()
        check_devices(config)
        self.model_config = model = read_config(config.model)
        self.max_model_len = max_model_len(config, model.max_position_embeddings)
        self.tokenizer = tokenizer_of(config, model)
        # No sequence outgrows the cache, however long a text the config allows.
        num_positions = min(self.max_model_len, config.num_blocks * config.block_size)
        # The files are held against the config before any memory is taken by its word.
        own = draft = None
        if config.draft is not None:
            draft = check_draft(config, model, self.tokenizer)
        if config.num_ranks == 1:
            self.ops = bind(target_of(config, model))
            own = own_rank(config, model, self.ops, self.tokenizer, self.faults, num_positions)
        else:
            check_fit(config.model, model)
        self._roles = Roles(config.attention_ranks)
        table, policy = routing(model, config)
        self._scheduler = Scheduler(config)
        self._admission = Admission(
            config, self.tokenizer, model.vocab_size, self.max_model_len, self._homes
        )
        self._announcer = Announcer(self.sink, config, model)
        self._outbox = Outbox(config, model.eos_token_ids, self._scheduler, self._announcer)
        door = Door(
            config.num_ranks, config.drill, config.deterministic, config.precision == "auto"
        )
        self.control = Control(table, policy, self.faults, self.sink, self.stats, door)
        self._steps = 0
        self._deciding = Deciding()
        self._bad_rows = 0
        self._to_abort: deque[int] = deque()
        if own is not None:
            self._on_own(own, draft, num_positions)
        else:
            self._runner = Crew(
                *(config, model, num_positions),
                scheduler=self._scheduler,
                control=self.control,
                door=door,
                roles=self._roles,
                faults=self.faults,
            )
        give_ranges(
            [("schedule", self._scheduler, "schedule"), ("postprocess", self._outbox, "take")]
        )
        self._announcer.start(table)

    @property
    def table(self) -> RoutingTable:
        """The routing table the next step will read."""
        return self.control.table

    @property
    def ranks(self) -> Mapping[int, int]:
        """The process id of each living rank; empty in one process."""
        return self._runner.pids

    @property
    def moe(self) -> list[MoE]:
        """The MoE layers of this process, for measurements; [] when others run the steps."""
        if not isinstance(self._runner, Runner):
            return []
        return [module for module in self._runner.rank.model.modules() if isinstance(module, MoE)]

    @property
    def transformer(self) -> Transformer:
        """The model as it stands in this process, to look at; changing it is `control`'s.

        Raises:
            RequestError: it stands in other processes.
        """
        return self._own(RequestError, "a look at the model").rank.model

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running, or has an output that nobody has taken."""
        return bool(self._scheduler.running or self._scheduler.waiting or self._outbox)

    def add(
        self,
        prompt: str | SequenceOf[int],
        params: SamplingParams | None = None,
        *,
        label: str = "",
        watch: SequenceOf[int] = (),
        priority: int = 0,
    ) -> int:
        """Queue a request.

        Args:
            prompt: text, or token ids as they are.
            params: how to sample; None is greedy with the defaults.
            label: a word for people, shown beside the request.
            watch: token positions whose whole decision is recorded in every MoE layer.
            priority: smaller is more urgent; a step is worth `priority_step_s` of waiting.

        Returns:
            The request's id.

        Raises:
            RequestError: the prompt is empty, too long with its output, or holds a bad id; or the
                priority is out of range.
        """
        return self._queue(
            self._admission.admit(prompt, params, label=label, watch=watch, priority=priority)
        )

    def abort(self, request_id: int) -> None:
        """End a request before the next step; an id that has ended or never was is ignored."""
        self._to_abort.append(request_id)

    def step(self) -> list[RequestOutput]:
        """Run one forward pass and return what each request gained; [] when there is no work.

        What `finish` and `generate` came by of other requests is returned first.
        """
        self._advance()
        return self._outbox.read()

    def _advance(self) -> None:
        """Run one forward pass, if there is work."""
        started_s, clock = time.time(), StageClock(keep=self.sink.enabled)
        self.control.end_leases()
        changes = self.control.changes
        if self.config.prefix_reuse:
            self._scheduler.conditions = self.control.conditions
        self._runner.before_step()
        self._abort_asked()
        schedule = self._scheduler.schedule()
        for sequence in schedule.preempted:
            self._announcer.request(sequence, "preempted")
        if not schedule.chunks:
            return
        clock.mark("schedule")
        with computing(self.config):
            if self._drafter is not None:
                policy = self.control.in_force.policy
                # What smoothing and a capacity do to a row depends on the rows before it.
                silent = bool(policy.smoothing) or policy.capacity_factor is not None
                self._drafter.propose(schedule, clock, silent=silent)
            terms = Terms(self.table, self.control.in_force, self.sink.enabled)
            result = self._runner.run(schedule, terms, clock)
            if result is None:
                return
            unchanged = changes == self.control.changes
            conditions = self._scheduler.conditions if unchanged else None
            books.enter(result, self._scheduler, conditions)
            self._outbox.take(result)
            if self._drafter is not None:
                clock.mark("postprocess")
                self._drafter.learn(result)
                clock.mark("plan")
        clock.mark("postprocess")
        self._steps += 1
        self._bad_rows += result.bad_rows
        duration_ms = (time.perf_counter_ns() - clock.began_ns) / 1e6
        self._deciding.add(clock.spent_ms(), duration_ms, result.dropped)
        look_ups = self._deciding.looked_up(result.look_ups)
        self._announcer.step(
            self._steps - 1, result, self._scheduler, started_s, duration_ms, look_ups
        )

    def generate(
        self,
        prompts: SequenceOf[str | SequenceOf[int]],
        params: SamplingParams | None = None,
        *,
        label: str = "",
    ) -> list[Completion]:
        """Run several prompts to their ends, together; completions come in the prompts' order.

        Raises:
            RequestError: a prompt cannot be admitted; none is run then.
        """
        admitted = [self._admission.admit(prompt, params, label=label) for prompt in prompts]
        return self.finish([self._queue(sequence) for sequence in admitted])

    def finish(self, request_ids: SequenceOf[int]) -> list[Completion]:
        """Step until the given requests have ended and return their completions, in that order.

        What other requests gain meanwhile is kept for `step`, and so is all of it if a step fails.

        Raises:
            RequestError: one of them is not under way: its end was returned by `step` or here
                before, or it was never added. Nothing is run then.
        """
        wanted, under_way = set(request_ids), self._outbox.under_way()
        if gone := [request_id for request_id in request_ids if request_id not in under_way]:
            raise RequestError(
                f"request {gone[0]} is not under way, so it cannot be finished; it has ended and "
                "its completion was returned then, or it was never added."
            )
        done: dict[int, Completion] = {}
        seen: list[RequestOutput] = []
        try:
            while wanted - done.keys():
                outputs = self.step()
                seen += outputs
                done |= {o.request_id: o.completion for o in outputs if o.completion}
        except BaseException:
            self._outbox.put_back(seen)
            raise
        self._outbox.put_back(out for out in seen if out.request_id not in wanted)
        return [done[request_id] for request_id in request_ids]

    def logits(self, prompt: str | SequenceOf[int]) -> np.ndarray:
        """Run one prompt alone and return the (T, V) fp32 logits of every position.

        The policy in force holds: bans, forced experts, biases, smoothing, capacity.

        Raises:
            RequestError: the prompt cannot be admitted, or other requests are under way.
        """
        runner = self._own(RequestError, "the logits of all positions")
        sequence = self._admission.admit(prompt, SamplingParams(max_tokens=0), request_id=-1)
        rows = []
        try:
            with computing(self.config):
                for start in range(0, len(sequence.token_ids), self.config.max_step_tokens):
                    schedule = self._scheduler.borrow(sequence, start)
                    terms = Terms(self.table, self.control.in_force)
                    rows.append(runner.all_logits(schedule, terms))
        finally:
            self._scheduler.remove(sequence)
        return np.asarray(torch.cat(rows).cpu().numpy())

    def look_up(self, max_rows: int) -> None:
        """Look placements and orders up in steps of at most `max_rows` rows; 0 never.

        Only in one process; the results are the same, only the time it takes is not.

        Raises:
            RoutingError: the engine runs on ranks.
        """
        self._own(RoutingError, "switching look-ups").rank.look_up(max_rows)

    def predict_ahead(self, on: bool) -> None:
        """Predict formats and a draft's worth ahead from the next step on, or when asked for.

        Only in one process; the decisions are the same, only the time they take is not.

        Raises:
            RoutingError: the engine runs on ranks.
        """
        rank = self._own(RoutingError, "switching predictions ahead").rank
        if rank.precision is not None:
            rank.precision.ahead = on
        if self._drafter is not None:
            self._drafter.policy.ahead = on

    def weights_sha256(self) -> str:
        """Hash every parameter as it stands in memory, for proofs that none has changed."""
        return self._runner.weights_sha256()

    def census(self) -> dict[int, dict[str, int]]:
        """Ask each rank for the memory it occupies and the collectives it has joined.

        All ranks must have joined as many, or one of them hangs. {} in one process.

        Returns:
            by rank `resident_bytes` and `collectives`.
        """
        return self._runner.census()

    def close(self) -> None:
        """Abort what still waits or runs, so that listeners learn of it; again does nothing."""
        self._outbox.abort()
        self._outbox.read()
        self._runner.close()

    def stats(self) -> EngineStats:
        """Return how busy the engine is."""
        scheduler = self._scheduler
        return EngineStats(
            steps=self._steps,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_free_blocks=sum(pool.num_free for pool in scheduler.pools),
            num_blocks=sum(pool.num_blocks for pool in scheduler.pools),
            bad_rows=self._bad_rows,
            dropped_slots=tuple(self._deciding.dropped),
            deciding=self._deciding.as_dict(),
            draft=self._drafter.as_dict() if self._drafter else None,
            num_kept_blocks=sum(pool.num_kept for pool in scheduler.pools),
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
        )

    def _on_own(self, own: Rank, draft: ModelConfig | None, num_positions: int) -> None:
        """Run the steps in this process, with a draft if there is one."""
        self._runner = Runner(own)
        if draft is not None:
            self._drafter = open_drafter(
                self.config, draft, self._scheduler, own.cache, self.faults, num_positions
            )

    def _homes(self) -> SequenceOf[int]:
        """Return the devices that can own sequences."""
        return self._roles.homes(self._runner.members)

    def _own(self, error: type[RequestError | RoutingError], what: str) -> Runner:
        """Return what runs the steps in this process, which `what` needs.

        Raises:
            the given error: other processes run them.
        """
        if not isinstance(self._runner, Runner):
            raise error(f"{what} needs an engine in one process; ranks = 1.")
        return self._runner

    def _queue(self, sequence: Sequence) -> int:
        # Said first: once it is queued, another thread may already be running it.
        self._announcer.request(sequence, "added")
        self._scheduler.add(sequence)
        return sequence.request_id

    def _abort_asked(self) -> None:
        wanted = {self._to_abort.popleft() for _ in range(len(self._to_abort))}
        if wanted:
            self._outbox.abort(wanted)
