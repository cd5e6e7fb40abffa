"""The bundled models are the same models in transformers, and our engine computes the same."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine import Engine, EngineConfig, SamplingParams
from engine.train.data import documents
from tests.numerics import close, max_error
from tests.runtime.conftest import DRAFT, MODEL

DOMAINS = ("en", "de", "fr", "es", "zh", "py", "math", "num")


@pytest.fixture(scope="module", params=[MODEL, DRAFT], ids=["moe", "draft"])
def pair(request):
    engine = Engine(EngineConfig(model=request.param, num_blocks=256, max_step_tokens=100))
    theirs = AutoModelForCausalLM.from_pretrained(request.param, dtype=torch.float32).eval()
    return engine, theirs


def held_out(domain, count):
    return [document.text for document in islice(documents(domain, "heldout"), count)]


def test_logits_agree_on_text_of_every_domain(pair):
    engine, theirs = pair
    for domain in DOMAINS:
        ids = engine.tokenizer.encode(held_out(domain, 1)[0])[:200]
        with torch.inference_mode():
            expected = theirs(torch.tensor([ids])).logits[0]
        ours = torch.from_numpy(engine.logits(ids))
        assert max_error(ours, expected) < 1e-5
        assert not close(ours.roll(1, 0), expected, 1e-2)


def test_greedy_text_agrees_for_64_tokens_on_prompts_of_every_domain(pair):
    engine, theirs = pair
    for domain in DOMAINS:
        ids = engine.tokenizer.encode(held_out(domain, 2)[1])[:24]
        ours = engine.generate([ids], SamplingParams(max_tokens=64))[0].token_ids
        expected = theirs.generate(
            torch.tensor([ids]), max_new_tokens=64, do_sample=False, pad_token_id=2
        )[0, len(ids) :].tolist()
        assert list(ours) == expected


@pytest.mark.parametrize("folder", [MODEL, DRAFT], ids=["moe", "draft"])
def test_every_held_out_text_has_the_same_ids_in_both_tokenizers(folder):
    from engine.model.tokenizer import Tokenizer

    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert (theirs.bos_token, theirs.eos_token, theirs.pad_token) == (
        "<|bos|>",
        "<|eos|>",
        "<|pad|>",
    )
    for domain in DOMAINS:
        for text in held_out(domain, 10**9):
            assert ours.encode(text) == theirs(text)["input_ids"]
