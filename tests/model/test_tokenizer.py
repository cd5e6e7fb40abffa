"""A tokenizer's file is not believed: odd ids are met, what is no byte-level one is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import CheckpointError
from engine.model.tokenizer import Tokenizer

SHIPPED = Path(__file__).parents[2] / "data/models/polyglot-moe"
RAW = json.loads((SHIPPED / "tokenizer.json").read_text(encoding="utf-8"))
TEXT = "Der Server ist größer"


def tokenizer(folder, change):
    (folder / "tokenizer.json").write_text(json.dumps(RAW | change), encoding="utf-8")
    return Tokenizer(folder)


@pytest.mark.parametrize("token_id", [4096, 5000])
def test_an_id_far_beyond_the_others_costs_nothing_and_decodes(tmp_path, token_id):
    vocab = RAW["model"]["vocab"] | {"zzzq": token_id}
    odd = tokenizer(tmp_path, {"model": RAW["model"] | {"vocab": vocab}})
    assert odd.vocab_size == token_id + 1
    assert odd.decode([*odd.encode(TEXT), token_id]) == TEXT + "zzzq"
    assert odd.decode([token_id + 1]) == "" and odd.token(token_id + 1) == ""


def test_cutting_and_filling_of_training_batches_is_switched_off(tmp_path):
    change = {
        "truncation": {
            "direction": "Right",
            "max_length": 3,
            "strategy": "LongestFirst",
            "stride": 0,
        },
        "padding": {
            "strategy": {"Fixed": 600},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "x",
        },
    }
    assert tokenizer(tmp_path, change).encode(TEXT) == Tokenizer(SHIPPED).encode(TEXT)


@pytest.mark.timeout(20)
def test_an_id_that_no_vocabulary_reaches_is_refused_at_once(tmp_path):
    vocab = RAW["model"]["vocab"] | {"zzzq": 2**31}
    with pytest.raises(CheckpointError, match="token id 2147483648"):
        tokenizer(tmp_path, {"model": RAW["model"] | {"vocab": vocab}})


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"decoder": None}, "byte-level"),
        ({"model": RAW["model"] | {"vocab": RAW["model"]["vocab"] | {"中": 4096}}}, "4096"),
        ({"model": {"type": "BPE"}}, "cannot be read"),
    ],
)
def test_what_is_no_byte_level_tokenizer_is_refused(tmp_path, change, word):
    with pytest.raises(CheckpointError, match=word):
        tokenizer(tmp_path, change)
