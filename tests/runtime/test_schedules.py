"""Random arrivals, aborts, tables and tight pools: every request ends as if it had been alone.

Deterministic mode, so that "as if alone" is an equal hash over logits.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine import SamplingParams
from engine.events import RequestEvent, StepEvent, TextEvent
from engine.routing.placement import filled
from tests.runtime.conftest import Listener

LENGTHS = (1, 2, 9, 16, 23)
PROMPTS = [[(7 * length + 31 * at) % 4096 for at in range(length)] for length in LENGTHS]
PARAMS = [
    SamplingParams(max_tokens=new, temperature=temperature, seed=5, ignore_eos=True)
    for new, temperature in ((0, 0.0), (1, 0.0), (6, 1.0), (9, 0.0))
]
LONGEST = max(LENGTHS) + 9


@pytest.fixture(scope="module")
def alone():
    from tests.runtime.conftest import _engine

    engine = _engine(deterministic=True, hash_logits=True)
    return {
        (prompt, params): engine.generate([PROMPTS[prompt]], PARAMS[params])[0]
        for prompt in range(len(PROMPTS))
        for params in range(len(PARAMS))
    }


def random_table(rng, version, devices):
    """Every expert somewhere, some of them twice, in another order in every layer."""
    slots = 8 + rng.randrange(5)
    layers = []
    for _ in range(4):
        held = [*range(8), *(rng.randrange(8) for _ in range(slots - 8))]
        rng.shuffle(held)
        layers.append(held)
    ranks = np.array([rng.randrange(devices) for _ in range(slots)])
    return filled(np.array(layers), ranks, 8, devices, version=version)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_schedule_each_request_ends_as_if_alone(make_engine, alone, seed):
    rng, listener = random.Random(seed), Listener()
    size, devices = rng.choice([1, 2, 3, 5, 16]), rng.choice([1, 2, 3, 8])
    most_rows, most_running = rng.choice([1, 3, 7, 33]), rng.choice([1, 2, 8])
    blocks = -(-LONGEST // size) + rng.choice([0, 1, 4])
    engine = make_engine(
        listener,
        deterministic=True,
        hash_logits=True,
        num_devices=devices,
        block_size=size,
        num_blocks=blocks,
        max_step_tokens=most_rows,
        max_running=most_running,
    )
    left = rng.randrange(4, 9)
    asked, done, version = {}, {}, 0
    while left or engine.has_work:
        if left and (rng.random() < 0.4 or not engine.has_work):
            left -= 1
            key = rng.randrange(len(PROMPTS)), rng.randrange(len(PARAMS))
            asked[engine.add(PROMPTS[key[0]], PARAMS[key[1]])] = key
        if asked and rng.random() < 0.03:
            engine.abort(rng.choice(list(asked)))
        if rng.random() < 0.5:
            version += 1
            engine.control.publish_table(random_table(rng, version, devices))
        for output in engine.step():
            if output.finished:
                assert output.request_id not in done, "a request ends once"
                done[output.request_id] = output.completion
        assert engine.stats().steps < 5000, "every request ends"
    assert engine.stats().num_free_blocks == blocks
    assert done.keys() == asked.keys()
    steps = listener.of(StepEvent)
    assert all(s.num_rows <= most_rows and s.num_running <= most_running for s in steps)
    for request_id, key in asked.items():
        check_rows(steps, done[request_id])
        check_story(listener, done[request_id])
        if done[request_id].finish_reason != "aborted":
            assert done[request_id].token_ids == alone[key].token_ids
            assert done[request_id].logits_sha256 == alone[key].logits_sha256


def check_rows(steps, done):
    """Each position is accepted once; all else is counted by its cause."""
    mine = [(s, s.request_ids == done.request_id) for s in steps]
    accepted = [p for s, own in mine for p in s.positions[own & (s.causes == 0)].tolist()]
    assert accepted == list(range(done.rows))
    again = sum(int((own & (s.causes != 0)).sum()) for s, own in mine)
    assert again == done.extra_rows.get("preemption", 0)
    prompt = done.prompt_token_ids
    tokens = [t for s, own in mine for t in s.token_ids[own & (s.causes == 0)].tolist()]
    assert tokens == [*prompt, *done.token_ids][: done.rows]


def check_story(listener, done):
    mine = [e for e in listener.of(RequestEvent) if e.request_id == done.request_id]
    kinds = [event.kind for event in mine]
    assert kinds[0] == "added" and kinds[-1] in ("finished", "aborted")
    assert set(kinds[1:-1]) <= {"preempted"}
    said = [e.delta for e in listener.of(TextEvent) if e.request_id == done.request_id]
    assert "".join(said) == done.text


@pytest.mark.parametrize("point", ["gate.logits", "experts.compute"])
def test_nan_in_one_requests_rows_reaches_no_other_and_no_later_one(make_engine, alone, point):
    engine = make_engine(deterministic=True, hash_logits=True, num_blocks=40, block_size=4)
    keys = [(2, 3), (3, 3), (4, 3)]
    rows_of_victim(engine, 1, point)
    prompts = [PROMPTS[prompt] for prompt, _ in keys]
    broken = engine.generate(prompts, PARAMS[3])
    right = [alone[key].logits_sha256 for key in keys]
    same = [one.logits_sha256 == hash_ for one, hash_ in zip(broken, right, strict=True)]
    assert same == [True, False, True]
    engine.control.clear(point)
    later = engine.generate(prompts, PARAMS[3])
    assert [one.logits_sha256 for one in later] == right


def rows_of_victim(engine, victim, point):
    """Set a fault that turns all rows of one request at `point` to NaN."""
    mask_T, mask_R = [], []
    rank = engine._runner.rank
    prepare = rank._prepare

    def note_rows(*arguments, **options):
        step = prepare(*arguments, **options)
        mask_T[:] = [torch.from_numpy(step.host.request_ids == victim)]
        return step

    def note_pairs(dispatch):
        def wrapped(x_TD, phy_ids_TK, table, layer, mark):
            (flight,) = dispatch(x_TD, phy_ids_TK, table, layer, mark)
            rows_RD, handle = flight.arrive()
            mask = torch.zeros(len(rows_RD), dtype=torch.bool)
            mask[handle.row_of_N] = mask_T[0].repeat_interleave(phy_ids_TK.shape[1])
            mask_R[:] = [mask]
            return [flight]

        return wrapped

    rank._prepare = note_rows
    for layer in rank.model.layers:
        layer.moe.dispatcher.dispatch = note_pairs(layer.moe.dispatcher.dispatch)
    masks = mask_T if point == "gate.logits" else mask_R
    engine.control.inject(
        point, lambda rows: rows.masked_fill(masks[0].unsqueeze(1), float("nan")), lease_s=60
    )


def test_logits_see_nothing_of_a_blocks_last_owner(make_engine):
    engine = make_engine(num_blocks=4, block_size=16)
    clean = engine.logits(PROMPTS[2])
    engine.control.inject("experts.compute", lambda rows: rows * float("nan"), lease_s=60)
    engine.generate([[5] * 60], SamplingParams(max_tokens=4, ignore_eos=True))
    engine.control.clear("experts.compute")
    for _ in range(4):
        assert (engine.logits(PROMPTS[2]) == clean).all()
