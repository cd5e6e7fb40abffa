from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.train.__main__ import main
from engine.train.batches import (
    SHARES,
    Stream,
    evaluation_windows,
    token_bytes,
    token_stream,
    training_batch,
)
from engine.train.evaluate import bits_per_byte
from engine.train.loading import load_network
from engine.train.network import Network
from engine.train.trainer import HISTORY, Reporting, TrainConfig, Trainer, train
from tests.train.conftest import MOE_FOLDER, TINY

Streams = dict[str, Stream]


@pytest.fixture
def config(tiny: ModelConfig) -> TrainConfig:
    return TrainConfig(
        model="tiny",
        num_steps=20,
        step_tokens=512,
        context=32,
        long_context=64,
        warm_up_steps=4,
        bf16=False,
    )


def parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.network.named_parameters()}


def test_the_loss_falls_in_twenty_steps(config: TrainConfig, streams: Streams) -> None:
    trainer = Trainer(replace(config, bf16=True), streams)
    losses = [trainer.step() for _ in range(20)]
    assert losses[0] == pytest.approx(np.log(TINY.vocab_size), abs=0.3)
    assert np.mean(losses[-3:]) < losses[0] - 1.0
    assert all(torch.isfinite(p).all() for p in trainer.network.parameters())


def test_a_bundled_model_learns_real_text_in_twenty_steps(tokenizer: Tokenizer) -> None:
    config = TrainConfig(model="draft", num_steps=20, step_tokens=512, warm_up_steps=4)
    stream = token_stream(tokenizer, "num", "heldout")
    trainer = Trainer(config, {"num": stream})
    losses = [trainer.step() for _ in range(20)]
    assert losses[0] > 8 and np.mean(losses[-3:]) < 5


def test_a_resumed_run_equals_an_uninterrupted_one(
    config: TrainConfig, streams: Streams, tmp_path: Path
) -> None:
    whole, first = Trainer(config, streams), Trainer(config, streams)
    losses = [whole.step() for _ in range(6)]
    for _ in range(3):
        first.step()
    first.save(tmp_path)
    second = Trainer(config, streams)
    assert second.restore(tmp_path) is True
    assert [second.step() for _ in range(3)] == losses[3:]
    for name, value in parameters(second).items():
        assert torch.equal(value, parameters(whole)[name]), name


def test_a_run_that_forgets_its_optimiser_would_be_noticed(
    config: TrainConfig, streams: Streams, tmp_path: Path
) -> None:
    whole, first = Trainer(config, streams), Trainer(config, streams)
    for _ in range(3):
        whole.step()
        first.step()
    first.save(tmp_path)
    forgetful = Trainer(config, streams)
    forgetful.optimiser.load_state_dict = lambda state: None  # type: ignore[method-assign]
    forgetful.restore(tmp_path)
    assert forgetful.step() == whole.step()
    assert not torch.equal(forgetful.network.norm.weight, whole.network.norm.weight)


def test_other_settings_are_refused_on_resuming(
    config: TrainConfig, streams: Streams, tmp_path: Path
) -> None:
    trainer = Trainer(config, streams)
    assert trainer.restore(tmp_path) is False
    trainer.save(tmp_path)
    with pytest.raises(ConfigError, match=r"seed \(1\) differs from the checkpoint's \(0\)"):
        Trainer(replace(config, seed=1), streams).restore(tmp_path)


def test_the_number_of_steps_may_change_until_the_decay_begins(
    config: TrainConfig, streams: Streams, tmp_path: Path
) -> None:
    long, short = Trainer(config, streams), Trainer(replace(config, num_steps=16), streams)
    for trainer in (long, short):
        for _ in range(8):
            trainer.step()
    for name, value in parameters(long).items():
        assert torch.equal(value, parameters(short)[name]), name
    long.save(tmp_path)
    assert Trainer(replace(config, num_steps=16), streams).restore(tmp_path)
    with pytest.raises(ConfigError, match=r"num_steps \(14\) differs"):
        Trainer(replace(config, num_steps=14), streams).restore(tmp_path)


def test_the_last_tenth_has_the_long_context(config: TrainConfig) -> None:
    assert [config.context_at(step) for step in (0, 17, 18, 19)] == [32, 32, 64, 64]


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="model .'huge'. is unknown"):
        TrainConfig(model="huge", num_steps=1)
    with pytest.raises(ConfigError, match="num_steps .0. must be at least 1"):
        TrainConfig(num_steps=0)


def test_batches_depend_on_seed_and_step_alone(streams: Streams) -> None:
    first = training_batch(streams, 3, 0, 8, 32)
    assert torch.equal(first, training_batch(streams, 3, 0, 8, 32))
    assert not torch.equal(first, training_batch(streams, 4, 0, 8, 32))
    assert not torch.equal(first, training_batch(streams, 3, 1, 8, 32))
    assert first.shape == (8, 33) and (first[:, 0] == 0).all()


def test_batches_mix_domains_by_their_shares(streams: Streams) -> None:
    seen = training_batch(streams, 0, 0, 4000, 8)[:, 1] // 50
    shares = torch.bincount(seen, minlength=len(SHARES)) / 4000
    assert torch.allclose(shares, torch.tensor(list(SHARES.values())), atol=0.03)
    assert sum(SHARES.values()) == pytest.approx(1.0)


def test_evaluation_windows_cover_a_stream_without_overlap() -> None:
    windows = evaluation_windows(np.arange(100, dtype=np.int64), 50, 9)
    assert windows.shape == (11, 10)
    assert windows[:, 1:].flatten().tolist() == list(range(1, 100))
    assert (windows[:, 0] == 0).all()
    assert len(evaluation_windows(np.arange(100, dtype=np.int64), 4, 9)) == 4


def test_streams_open_every_document_with_bos_and_close_it_with_eos(
    make_corpus: Callable[[], Path], tokenizer: Tokenizer
) -> None:
    stream = token_stream(tokenizer, "en", "heldout", make_corpus())
    assert (stream == 0).sum() == (stream == 1).sum() == 3
    assert stream[0] == 0 and stream[-1] == 1


def test_bits_per_byte_of_a_network_that_knows_nothing(tokenizer: Tokenizer) -> None:
    network = Network(TINY)
    network.embed.weight.data.zero_()
    windows = torch.tensor([[0, *tokenizer.encode("So ein schöner Tag!").ids[1:]]])
    num_tokens = windows.shape[1] - 1
    found = bits_per_byte(network, windows, token_bytes(tokenizer), torch.float32)
    assert found == pytest.approx(12 * num_tokens / len("So ein schöner Tag!".encode()))


def test_a_run_reports_checks_saves_and_continues(
    config: TrainConfig, streams: Streams, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    short = replace(config, num_steps=5)
    said: list[str] = []
    reporting = Reporting(progress_every=2, check_every=4, save_every=3, check_windows=1)
    trainer = Trainer(short, streams)
    small = {"en": streams["en"]}
    train(trainer, tmp_path, small, token_bytes(tokenizer), reporting, said.append)
    assert sum("tokens/s" in line for line in said) == 3
    assert len((tmp_path / HISTORY).read_text().splitlines()) == 2
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 5
    # Interrupted after a check that no checkpoint remembers, it is checked again, but listed once.
    trainer.num_done = 3
    train(trainer, tmp_path, small, token_bytes(tokenizer), reporting, said.append)
    history = (tmp_path / HISTORY).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in history] == [4, 5]


def test_the_command_trains_distils_and_writes_a_folder(
    make_corpus: Callable[[], Path],
    tmp_path: Path,
    config: TrainConfig,
    streams: Streams,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Trainer(replace(config, num_steps=1), streams).save(tmp_path / "teacher")
    out = tmp_path / "models" / "draft"
    arguments = [
        *("--model", "draft", "--steps", "2", "--step-tokens", "128", "--no-compile"),
        *("--out", str(out), "--run", str(tmp_path / "run"), "--corpus", str(make_corpus())),
        *("--tokenizer", str(MOE_FOLDER / "tokenizer.json")),
    ]
    # Contexts of 256 do not go into 128 tokens.
    assert main(arguments) == 2
    assert "step_tokens (128) must be at least" in capsys.readouterr().err
    arguments[arguments.index("128")] = "512"
    assert main(arguments) == 0
    assert "step 2/2" in capsys.readouterr().out
    assert load_network(out).config.family == "qwen3"
    assert (tmp_path / "models" / "draft.history.jsonl").is_file()
    assert main([*arguments[:-1], "nowhere.json"]) == 2
    assert "tokenizer (nowhere.json) is not a file" in capsys.readouterr().err


def test_a_teacher_changes_what_is_learnt(
    config: TrainConfig, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = Network(TINY, seed=9).requires_grad_(False)
    teacher.embed.weight.data[7] *= 50
    alone, taught = Trainer(config, streams), Trainer(config, streams, teacher=teacher)
    for _ in range(2):
        alone.step()
        taught.step()
    assert not torch.equal(alone.network.embed.weight, taught.network.embed.weight)
    assert teacher.embed.weight.grad is None
