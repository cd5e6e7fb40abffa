"""What an operator has before them: an engine under traffic, its recent past, known answers.

The session asks for more of it and judges it; nothing here knows what a drill has broken.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import WorkbenchError
from engine.events import ControlEvent
from workbench.drills.deployment import Deployment
from workbench.drills.jobs import Plan
from workbench.drills.ledger import Ledger
from workbench.drills.readings import Readings, Unreadable
from workbench.drills.window import Window
from workbench.traffic import Prompt, Traffic, beginning_alike, corpus_prompts

if TYPE_CHECKING:
    from engine import Engine
    from engine.runtime.engine import RequestOutput
    from workbench.trace.schema import Array

PATIENCE_STEPS = 400
"""Steps run at most to gather rows."""
PATIENCE_S = 25.0
"""Seconds spent at most to gather rows."""
SETTLE_STEPS, SETTLE_S = 1000, 8.0
"""Steps and seconds waited at most until a change has reached every rank."""
QUESTIONS = 12
"""Texts asked about; each is cut at `CUTS` places."""
CUTS = (0.4, 0.6, 0.8, 1.0)
SAMPLED_TOKENS = 4
"""Tokens drawn for each question where answers are drawn."""
IDLE_S = 0.02
MOST_CHANGES = 8
_KNOWN = "known"
GUEST, GUEST_TOKENS = "guest", 8


class Evidence:
    """Runs the engine's steps and reads what they leave."""

    def __init__(
        self,
        deployment: Deployment,
        window: Window,
        planned: Sequence[Mapping[str, object]],
        *,
        running: int,
        seed: int,
        domain: str | None = None,
        sampled: bool = False,
        guest: str = "",
        beginnings: int = 0,
    ) -> None:
        """Take charge of the engine's steps.

        Args:
            deployment: its engine is under traffic while this is asked for more.
            window: what it records.
            planned: the change record, read as it grows; its last entry is the newest.
            running: requests kept going.
            seed: of the prompts and of the known questions.
            domain: of the prompts; None mixes all.
            sampled: whether known questions are answered by drawing.
            guest: a text that a guest asks about again and again; "" for none.
            beginnings: different long beginnings that the prompts share; 0 for none.
        """
        self._beginnings, self._warm = beginnings, deployment.generation
        self._prompts = corpus_prompts(seed=seed)
        if beginnings:
            self._prompts = beginning_alike(self._prompts, beginnings)
        self._deployment, self._window, self._planned = deployment, window, planned
        self._seed, self._sampled, self._guest = seed, sampled, guest
        self._past: deque[str] = deque(maxlen=MOST_CHANGES)
        self._guest_id = -1
        self._asked_last: list[int] = []
        self._labels: dict[int, str] = {}
        self.padding = [pad_token(deployment.require())] * 2
        """What the guest's client puts between two texts."""
        self.refused: set[str] = set()
        """Labels of requests that the gateway refuses."""
        self.ledger = Ledger()
        self.traffic = Traffic(self._prompts, running, seed)
        self.traffic.choose(domain=domain)
        self._generation = deployment.generation
        self._questions = _questions(deployment.require(), self._prompts)
        self._known: tuple[int, ...] = ()
        self._choices: Array = np.zeros((0, 0, 0), np.int64)
        """(N, L, K) the experts of the known questions' tokens, as they were."""
        self.plan: Plan = lambda load_LE, spare: None
        """How a job beside the engine publishes a table."""

    def step(self) -> list[RequestOutput]:
        """Run one step of traffic; an engine that ends under it is noted as crashed."""
        engine = self._deployment.engine
        if engine is None:
            time.sleep(IDLE_S)
            return []
        if self._generation != self._deployment.generation:
            self._start_over()
        try:
            self.traffic.fill(engine)
            self._let_guest_ask(engine)
            outputs = engine.step()
        except WorkbenchError as ended:
            self._deployment.crashed(str(ended))
            return []
        except BaseException:  # a signal in the middle of a talk with the ranks
            self._deployment.broken_off = True
            raise
        self.traffic.settle(outputs)
        if any(output.finished and output.request_id == self._guest_id for output in outputs):
            self._guest_id = -1
        self.ledger.take(outputs)
        tokens = sum(len(output.token_ids) for output in outputs)
        for job in self._deployment.jobs.values():
            job.tick(self._window.trace, tokens, self.plan)
        return outputs

    def refuse(self, label: str) -> None:
        """Let the gateway refuse requests of a label, and end those that run."""
        self.refused.add(label)
        if label == GUEST and self._guest_id >= 0 and self._deployment.engine is not None:
            self._deployment.engine.abort(self._guest_id)

    @property
    def most_rows(self) -> int:
        """How many rows are recorded at most; the oldest go first."""
        return self._window.max_rows

    @property
    def changes(self) -> list[str]:
        """The newest changes of tables and ranks, in words, oldest first."""
        return [*self._past, *_changes(self._window.trace().controls)][-MOST_CHANGES:]

    def broken(self) -> dict[str, int]:
        """Return by label how many recorded rows have choices that rest on no numbers."""
        columns = self._window.trace().columns
        margins_NL = columns["rows/margins"]
        rows = np.flatnonzero(np.isnan(margins_NL).any(axis=1))
        requests = columns["rows/request_ids"][rows].tolist()
        return dict(Counter(self._labels.get(number, "other") for number in requests))

    def choose(self, *, running: int | None = None, domain: str | None = None) -> None:
        """Ask other things of the engine from now on; what is None stays."""
        self.traffic.choose(running=running, domain=domain)

    def gather(self, rows: int, tell: Callable[[int], None] = lambda have: None) -> None:
        """Run traffic until the window holds enough rows, within patience; tell how many it has."""
        until = time.monotonic() + PATIENCE_S
        for _ in range(PATIENCE_STEPS):
            have = self._window.num_rows
            tell(min(have, rows))
            if have >= rows or self._deployment.engine is None or time.monotonic() > until:
                return
            self.step()

    def run(self, seconds: float) -> None:
        """Run traffic for so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.step()

    def settle(self, *, ordered: bool = False) -> None:
        """Run steps until a new engine is under way, and the newest table in force or given up.

        Args:
            ordered: whether ranks may have been ordered something that only a step does.
        """
        until = time.monotonic() + SETTLE_S
        fresh = self._generation != self._deployment.generation
        for _ in range(SETTLE_STEPS):
            engine = self._deployment.engine
            if engine is None or time.monotonic() > until:
                return
            behind = engine.table.version < int(str(self._planned[-1]["version"]))
            if not (fresh or engine.ranks and (behind or ordered)):
                return
            ordered = False
            self.step()
            if fresh:  # a new engine has all prompts before it at once, which says nothing
                fresh = bool(self._window.trace().columns["steps/num_prefill_rows"][-1:].any())
                continue
            gave_up = any(note.action == "give_up_table" for note in self._window.trace().controls)
            if gave_up:
                return

    def warm_up(self) -> None:
        """Ask the known questions of an engine that has just started, if its cache matters."""
        if self._beginnings and self._warm != self._deployment.generation:
            self._warm = self._deployment.generation
            with contextlib.suppress(Unreadable):
                self.ask()

    def clear(self) -> None:
        """Begin anew: what was recorded before a change says nothing about it."""
        self._past.extend(_changes(self._window.trace().controls))
        self._window.clear()
        self.ledger.clear()

    def write_down_answers(self) -> None:
        """Ask every question; keep the answers and the choices of experts as the right ones."""
        self._known = tuple(self.ask())
        self._choices = self._chosen()

    def ask(self, instance: int = 0, *, drawn: bool = False) -> list[int]:
        """Ask every question, the first instance beside its traffic.

        Args:
            instance: 0 is the first.
            drawn: whether answers are drawn even where the drill asks for the likeliest.

        Returns:
            The first token of each answer, or all drawn tokens of each where answers are drawn.

        Raises:
            Unreadable: the engine does not run, or ends meanwhile.
        """
        if instance == 0:
            return self._asked(self._deployment.engine, self.step, drawn=drawn)
        other = self._deployment.others[instance - 1]
        step = other.step if other is not None else list
        return self._asked(other, step, instance, drawn=drawn)

    def ask_gateway(self) -> int:
        """Ask one question after the other as the gateway does; return how many are answered."""
        ready = [at for at, is_ready in enumerate(self._deployment.instances_ready) if is_ready]
        running = self._deployment.instances_running
        turns = [ready[number % len(ready)] for number in range(len(self._questions)) if ready]
        for instance in sorted(set(turns)):
            if running[instance]:
                self.ask(instance)
        return sum(running[instance] for instance in turns)

    def readings(self) -> Readings:
        """Return what an operator has before them now."""
        engine = self._deployment.engine
        return Readings(
            trace=self._window.trace(),
            table_now=engine.table if engine is not None else None,
            planned=self._planned[-1],
            ask=self.ask,
            known=self._known,
            facts=self._deployment.facts() | {"canary": _canary(engine)},
            ledger=self.ledger.facts(),
            answered_of=lambda: (self.ask_gateway(), len(self._questions)),
            choices=self._chosen,
            choices_known=self._choices,
            rows_of_table=self._window.rows_of_table,
            units=tuple(self._window.units),
            published=self._deployment.published,
            folder=self._deployment.folder,
        )

    def _asked(
        self,
        engine: Engine | None,
        step: Callable[[], list[RequestOutput]],
        instance: int = 0,
        *,
        drawn: bool = False,
    ) -> list[int]:
        from engine import SamplingParams

        if engine is None:
            raise Unreadable("the engine does not run, so nothing can be asked.")
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        if self._sampled or drawn:
            params = SamplingParams(max_tokens=SAMPLED_TOKENS, temperature=1.0, ignore_eos=True)
        # What is drawn follows from the instance's seed and the question, as at a gateway that
        # gives each text a seed of its own.
        base = int(self._deployment.all_options[instance].get("seed", 0)) * 1009
        waiting = [
            engine.add(question, replace(params, seed=base + number), label=_KNOWN)
            for number, question in enumerate(self._questions)
        ]
        if instance == 0:
            self._asked_last = waiting
        given: dict[int, tuple[int, ...]] = {}
        with self._window.closed():
            while len(given) < len(waiting):
                for output in step():
                    if output.completion and output.label == _KNOWN:
                        given[output.request_id] = output.completion.token_ids
                if engine is self._deployment.engine or engine in self._deployment.others:
                    continue
                raise Unreadable("the engine ended while it was asked.")
        return [token for request_id in waiting for token in given[request_id]]

    def _let_guest_ask(self, engine: Engine) -> None:
        """Add the guest's request once the last has ended, unless the gateway refuses it."""
        from engine import SamplingParams

        if not self._guest or self._guest_id >= 0 or GUEST in self.refused:
            return
        params = SamplingParams(max_tokens=GUEST_TOKENS, ignore_eos=True)
        text = engine.tokenizer.encode(self._guest)
        self._guest_id = engine.add([*text, *self.padding, *text], params, label=GUEST)
        self._labels[self._guest_id] = GUEST

    def _chosen(self) -> Array:
        """Return (N, L, K) the experts of the tokens of the questions asked last, each in order."""
        columns = self._window.exam.trace().columns
        requests, positions = columns["rows/request_ids"], columns["rows/positions"]
        mine = np.flatnonzero(np.isin(requests, self._asked_last))
        order = mine[np.lexsort((positions[mine], requests[mine]))]
        return np.sort(columns["rows/topk_ids"][order], axis=-1)

    def _start_over(self) -> None:
        """Let a new engine have traffic of its own: the old one's requests are lost with it."""
        before, self._generation = self.traffic, self._deployment.generation
        self.ledger.lost(before.num_alive)
        self.traffic = Traffic(self._prompts, before.running, self._seed + self._generation)
        self.traffic.choose(domain=before.domain)
        self._guest_id = -1
        self._window.clear()


def pad_token(engine: Engine) -> int:
    """Return the id that fills gaps in batches of other systems; no text of ours has it."""
    token = engine.model_config.pad_token_id
    return engine.model_config.vocab_size - 1 if token is None else token


def _changes(controls: Sequence[ControlEvent]) -> list[str]:
    """Say what became of tables and ranks."""
    said = []
    for event in controls:
        detail = event.detail
        if event.action == "publish_table":
            said.append(f"table version {detail['version']} is in force")
        elif event.action == "give_up_table":
            said.append(f"table version {detail['version']} was given up: {detail['why']}")
        elif event.action == "recover":
            said.append(f"ranks {detail['members']} joined anew: {detail['reason']}")
    return said


def _canary(engine: Engine | None) -> Any:
    return None if engine is None else engine.control.state()["canary"]


def _questions(engine: Engine, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return beginnings of the first texts; what follows each is a known question."""
    questions = []
    for prompt in prompts[:QUESTIONS]:
        tokens = engine.tokenizer.encode(prompt.text)
        questions += [tokens[: max(2, round(len(tokens) * cut))] for cut in CUTS]
    return questions
