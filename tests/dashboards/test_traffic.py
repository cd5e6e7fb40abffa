"""Mixed traffic and the desk where control messages wait for the engine's thread."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from engine.errors import ConfigError, RequestError
from engine.train.data import DOMAINS, documents
from workbench.desk import Desk
from workbench.traffic import NEW_TOKENS, Prompt, Traffic, corpus_prompts, excerpt


class FakeEngine:
    """Ends each request after as many steps as it may have tokens, divided by 32."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.labels: list[str] = []
        self.most = 0
        self.watched: list[tuple] = []

    @property
    def has_work(self) -> bool:
        return bool(self.left)

    tokenizer = SimpleNamespace(encode=lambda text: [0, *text.encode()])

    def add(self, text: str, params: object, *, label: str, watch: range = range(0)) -> int:
        if watch:
            self.watched.append((text, label, params, watch))
            return 1000
        assert text and NEW_TOKENS[0] <= params.max_tokens <= NEW_TOKENS[1]
        self.labels.append(label)
        self.left[len(self.labels)] = params.max_tokens // 32
        self.most = max(self.most, len(self.left))
        return len(self.labels)

    def step(self) -> list[SimpleNamespace]:
        outputs = []
        for request_id in list(self.left):
            self.left[request_id] -= 1
            finished = self.left[request_id] == 0
            if finished:
                del self.left[request_id]
            outputs.append(SimpleNamespace(request_id=request_id, finished=finished))
        return outputs


def test_prompts_are_held_out_mixed_and_the_same_every_time():
    prompts = corpus_prompts(texts=6)
    assert prompts == corpus_prompts(texts=6) != corpus_prompts(texts=6, seed=1)
    assert Counter(prompt.domain for prompt in prompts) == dict.fromkeys(DOMAINS, 6)
    assert {prompt.domain for prompt in prompts[:8]} == set(DOMAINS), "any stretch is mixed"
    held_out = "\n".join(d.text for d in documents("de", "heldout"))
    for prompt in prompts:
        assert 0 < len(prompt.text) <= 90 and prompt.text == prompt.text.rstrip()
        assert prompt.domain != "de" or prompt.text in held_out


@pytest.mark.parametrize(
    "text", ["a", "a b", "\n\nx", "word " * 50, "字" * 200, "x" * 500, " " * 9]
)
def test_an_excerpt_is_a_piece_of_its_text_and_never_empty(text):
    for seed in range(5):
        piece = excerpt(text, random.Random(seed))
        assert piece and piece in text


def test_traffic_keeps_so_many_running_and_goes_round():
    engine = FakeEngine()
    traffic = Traffic([Prompt("en", "a"), Prompt("de", "b"), Prompt("fr", "c")], running=5)
    for _ in range(50):
        assert traffic.step(engine)
    assert engine.most == 5 and len(engine.labels) > 20
    assert engine.labels[:6] == ["en", "de", "fr", "en", "de", "fr"]


def test_paused_traffic_runs_dry_and_resumes():
    engine = FakeEngine()
    traffic = Traffic([Prompt("en", "a")], running=3)
    traffic.step(engine)
    traffic.paused = True
    while traffic.step(engine):
        pass
    assert len(engine.labels) == 3 and not engine.has_work
    traffic.paused = False
    assert traffic.step(engine) and len(engine.labels) == 6


def test_no_requests_at_all_is_refused():
    with pytest.raises(ConfigError, match=r"running \(0\)"):
        Traffic([Prompt("en", "a")], running=0)


def test_a_chosen_domain_and_number_hold_from_then_on_and_nonsense_changes_nothing():
    engine = FakeEngine()
    traffic = Traffic([Prompt("en", "a"), Prompt("de", "b"), Prompt("fr", "c")], running=2)
    assert traffic.domains == ("de", "en", "fr")
    traffic.choose(domain="fr", running=4)
    for _ in range(30):
        traffic.step(engine)
    assert set(engine.labels) == {"fr"} and engine.most == 4
    for wrong in ({"domain": "klingon"}, {"running": 0}, {"running": 1000}, {"domain": ""}):
        with pytest.raises(ConfigError):
            traffic.choose(**{"paused": True, **wrong})
    assert (traffic.domain, traffic.running, traffic.paused) == ("fr", 4, False)
    traffic.choose(domain="all")
    engine.labels.clear()
    for _ in range(30):
        traffic.step(engine)
    assert set(engine.labels) == {"en", "de", "fr"}


def test_a_watched_request_is_one_more_and_watches_only_tokens_it_can_have():
    engine = FakeEngine()
    traffic = Traffic([Prompt("en", "a"), Prompt("de", "b")], running=1)
    traffic.choose(paused=True)
    assert traffic.watch(engine, "own words") == 1000
    assert traffic.watch(engine) == 1000
    (text, label, params, watch), (_, domain, prompt_params, _) = engine.watched
    assert (text, label, params.temperature) == ("own words", "yours", 0.0)
    assert watch == range(len("own words") + 1 + params.max_tokens)
    assert domain == "en" and prompt_params.temperature > 0
    traffic.watch(engine, "x" * 500)
    assert engine.watched[-1][3] == range(96), "memory stays bounded"


def test_what_runs_aside_does_not_wait_for_the_engines_thread():
    desk = Desk()
    desk.handle("read", lambda detail: {"thread": threading.current_thread().name}, aside=True)
    answer = desk.take("read", {})
    assert answer.result(10)["thread"] != threading.current_thread().name
    desk.close()


def test_the_desk_runs_messages_on_the_thread_that_serves_it():
    desk = Desk()
    threads: list[str] = []

    def handler(detail: dict) -> dict:
        threads.append(threading.current_thread().name)
        if "bad" in detail:
            raise RequestError("bad is not allowed.")
        return {"twice": 2 * detail["n"]}

    desk.handle("double", handler)
    answers = []
    asker = threading.Thread(target=lambda: answers.append(desk.take("double", {"n": 4})))
    asker.start()
    asker.join()
    assert not answers[0].done(), "nothing runs before the desk is served"
    refused = desk.take("double", {"bad": 1})
    desk.serve()
    assert answers[0].result(0) == {"twice": 8}
    assert isinstance(refused.exception(0), RequestError)
    assert set(threads) == {threading.current_thread().name}


def test_the_desk_refuses_what_it_does_not_know():
    desk = Desk()
    with pytest.raises(RequestError, match="known actions: none yet"):
        desk.take("pause", {})
    desk.handle("traffic", lambda detail: None)
    with pytest.raises(RequestError, match="unknown action 'trafic'; did you mean 'traffic'"):
        desk.take("trafic", {})


def test_an_idle_desk_waits_no_longer_than_asked():
    desk = Desk()
    before = time.monotonic()
    desk.serve()
    desk.serve(0.05)
    assert time.monotonic() - before < 5
