"""What a real engine tells a recorder: every row once, in the token's place."""

from __future__ import annotations

import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.events import Tee
from workbench import paths
from workbench.trace import Recorder, load, replay, save

FOLDER = paths.model_folder(paths.DEFAULT_MODEL)


class Listener:
    """A live sink that simply keeps what it hears."""

    enabled = True

    def __init__(self):
        self.events = []

    def emit(self, event):
        self.events.append(event)


def run(requests, *, sink=None, **options):
    recorder = Recorder()
    heard = Tee([recorder, sink]) if sink else recorder
    engine = Engine(EngineConfig(model=FOLDER, **options), sink=heard)
    ids = [
        engine.add(prompt, SamplingParams(max_tokens=n, ignore_eos=True)) for prompt, n in requests
    ]
    completions = engine.finish(ids)
    engine.close()
    return recorder.trace(), completions


@pytest.mark.parametrize(("new", "rows"), [(0, 5), (1, 5), (2, 6), (7, 11)])
def test_a_prompt_of_five_and_n_new_tokens_make_rows(new, rows):
    prompt = [0, 11, 12, 13, 14]
    trace, (completion,) = run([(prompt, new)])
    assert trace.num_rows == completion.rows == rows
    assert trace.columns["rows/topk_ids"].shape == (rows, 4, 2)
    assert trace.columns["rows/positions"].tolist() == list(range(rows))
    tokens = [*prompt, *completion.token_ids]
    assert len(completion.token_ids) == new
    assert trace.columns["rows/token_ids"].tolist() == tokens[:rows]
    assert trace.expert_counts().sum(-1).tolist() == [rows * 2] * 4


def test_rows_of_many_requests_belong_to_their_tokens():
    requests = [([0, *range(20 + i, 25 + 2 * i)], 3 + i) for i in range(5)]
    trace, completions = run(requests, num_devices=4, max_step_tokens=16)
    for (prompt, _), done in zip(requests, completions, strict=True):
        rows = trace.rows_of(done.request_id)
        tokens = [*prompt, *done.token_ids]
        assert trace.columns["rows/token_ids"][rows].tolist() == tokens[:-1]
        assert trace.columns["rows/positions"][rows].tolist() == list(range(len(tokens) - 1))
        assert set(trace.columns["rows/homes"][rows].tolist()) == {done.request_id % 4}


def test_replay_of_the_file_is_what_the_live_sink_saw(same, tmp_path):
    listener = Listener()
    trace, _ = run([([0, 5, 6], 4), ([0, 7], 6)], sink=listener, num_devices=2)
    played = list(replay(load(save(trace, tmp_path / "x.moetrace"))))
    assert len(played) == len(listener.events) > 10
    assert all(map(same, played, listener.events))


def test_a_dense_model_can_be_recorded(tmp_path):
    recorder = Recorder()
    engine = Engine(EngineConfig(model=paths.model_folder("polyglot-draft")), sink=recorder)
    engine.generate([[0, 5, 6]], SamplingParams(max_tokens=2, ignore_eos=True))
    engine.close()
    trace = load(save(recorder.trace(), tmp_path / "x.moetrace"))
    assert trace.num_rows == 4 and trace.columns["rows/topk_ids"].shape == (4, 0, 0)
