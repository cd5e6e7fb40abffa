"""The shipped weights: how well they predict held-out text, and that their experts specialise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from engine.checkpoint.manifest import verify
from engine.checkpoint.reader import CheckpointReader
from engine.config import ModelConfig
from engine.train.batches import Stream, evaluation_windows, token_bytes, token_streams
from engine.train.evaluate import bits_per_byte
from engine.train.loading import load_network
from engine.train.network import DRAFT, MOE, Network
from engine.train.specialisation import expert_counts, information_by_layer
from tests.train.conftest import MOE_FOLDER

DRAFT_FOLDER = MOE_FOLDER.with_name("polyglot-draft")
WINDOWS = 4

BOUNDS = {
    "en": 1.54,
    "de": 1.18,
    "fr": 1.04,
    "es": 1.51,
    "zh": 1.42,
    "py": 1.05,
    "math": 0.87,
    "num": 1.39,
}
"""Bits per byte on four held-out windows; polyglot-moe has about 3 % less in each domain."""


@pytest.fixture(scope="module")
def heldout(tokenizer: Tokenizer) -> dict[str, Stream]:
    return token_streams(tokenizer, "heldout")


@pytest.fixture(scope="module")
def target() -> Network:
    return load_network(MOE_FOLDER)


@pytest.fixture(scope="module")
def draft() -> Network:
    return load_network(DRAFT_FOLDER)


@pytest.mark.parametrize("domain", BOUNDS)
def test_the_target_predicts_held_out_text(
    target: Network, tokenizer: Tokenizer, heldout: dict[str, Stream], domain: str
) -> None:
    windows = evaluation_windows(heldout[domain], WINDOWS, 256)
    assert bits_per_byte(target, windows, token_bytes(tokenizer)) < BOUNDS[domain]


def test_the_bounds_tell_a_damaged_model_from_the_shipped_one(
    tokenizer: Tokenizer, heldout: dict[str, Stream]
) -> None:
    network = load_network(MOE_FOLDER)
    network.layers[1].moe.experts.down.data = network.layers[1].moe.experts.down.roll(1, dims=0)
    windows = evaluation_windows(heldout["de"], WINDOWS, 256)
    assert bits_per_byte(network, windows, token_bytes(tokenizer)) > BOUNDS["de"]


def test_the_long_context_was_trained(
    target: Network, tokenizer: Tokenizer, heldout: dict[str, Stream]
) -> None:
    # Positions 256..511 must profit from what stands before them, not suffer.
    windows = evaluation_windows(heldout["en"], 6, 512)
    with torch.no_grad():
        logits, _ = target(windows[:, :-1], torch.bfloat16)
    nats = torch.nn.functional.cross_entropy(
        logits.float().mT, windows[:, 1:], reduction="none"
    ).mean(0)
    assert nats[256:].mean() < nats[:64].mean()


def test_experts_specialise_in_domains(target: Network, heldout: dict[str, Stream]) -> None:
    counts = {
        domain: expert_counts(target, evaluation_windows(stream, 12, 256))
        for domain, stream in heldout.items()
    }
    information = information_by_layer(counts, num_shuffles=1999)
    assert sum(layer.bits >= 0.3 and layer.p_value < 0.001 for layer in information) >= 3
    # Whole windows with shuffled domains tell nothing.
    everything = np.concatenate(list(counts.values()))
    mixed = {f"part {part}": everything[part::8] for part in range(8)}
    assert max(layer.bits for layer in information_by_layer(mixed, num_shuffles=19)) < 0.1


def test_the_draft_predicts_too_but_worse(
    target: Network, draft: Network, tokenizer: Tokenizer, heldout: dict[str, Stream]
) -> None:
    windows = evaluation_windows(heldout["de"], WINDOWS, 256)
    bits = bits_per_byte(draft, windows, token_bytes(tokenizer))
    assert bits_per_byte(target, windows, token_bytes(tokenizer)) < bits < 2.2


@pytest.mark.parametrize(("folder", "config"), [(MOE_FOLDER, MOE), (DRAFT_FOLDER, DRAFT)])
def test_a_model_folder_is_whole_and_has_the_trained_shape(
    folder: Path, config: ModelConfig
) -> None:
    manifest = verify(folder)
    assert {"config.json", "generation_config.json", "tokenizer.json"} < set(manifest.files)
    reader = CheckpointReader(folder)
    assert {reader.dtype(name) for name in reader.names()} == {torch.bfloat16}
    reader.close()
    read = load_network(folder).config
    for name in ("hidden_size", "num_layers", "num_experts", "max_position_embeddings"):
        assert getattr(read, name) == getattr(config, name)


def test_both_models_have_one_tokenizer_and_a_report() -> None:
    ours, theirs = (
        (folder / "tokenizer.json").read_bytes() for folder in (MOE_FOLDER, DRAFT_FOLDER)
    )
    assert ours == theirs
    for folder in (MOE_FOLDER, DRAFT_FOLDER):
        assert "globally nonsense" in (folder / "README.md").read_text(encoding="utf-8")
    report = (MOE_FOLDER / "README.md").read_text(encoding="utf-8")
    for heading in ("Bits per byte", "What the experts specialise in", "What masking one expert"):
        assert f"## {heading}" in report
    assert "## Acceptance by domain" in (DRAFT_FOLDER / "README.md").read_text(encoding="utf-8")
