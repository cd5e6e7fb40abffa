from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from engine.train.batches import token_bytes
from engine.train.data import DOMAINS, documents
from engine.train.tokenizer import BOS, EOS, PAD, VOCAB_SIZE, train_tokenizer, write_tokenizer
from tests.train.conftest import MOE_FOLDER


def test_every_held_out_text_survives_encoding_and_decoding(tokenizer: Tokenizer) -> None:
    for domain in DOMAINS:
        texts = [document.text for document in documents(domain, "heldout")]
        encoded = tokenizer.encode_batch(texts)
        assert tokenizer.decode_batch([one.ids for one in encoded]) == texts
        assert all(one.ids[0] == 0 and min(one.ids[1:]) > 2 for one in encoded)


def test_transformers_reads_the_same_ids_for_every_held_out_text(tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(MOE_FOLDER)
    for domain in DOMAINS:
        texts = [document.text for document in documents(domain, "heldout")]
        ours = [one.ids for one in tokenizer.encode_batch(texts)]
        assert theirs(texts)["input_ids"] == ours
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (0, 1, 2)
    assert theirs.decode(ours[0], skip_special_tokens=True) == texts[0]


def test_any_bytes_and_every_digit_alone_are_written(tokenizer: Tokenizer) -> None:
    text = "x\t\x00 — 😀 ꙮ\r\n  y 2026"
    encoded = tokenizer.encode(text)
    assert tokenizer.decode(encoded.ids) == text
    assert [token[-1] for token in encoded.tokens[-4:]] == ["2", "0", "2", "6"]


def test_the_bytes_of_tokens_add_up_to_the_text(tokenizer: Tokenizer) -> None:
    sizes = token_bytes(tokenizer)
    text = next(documents("zh", "heldout")).text
    assert int(sizes[tokenizer.encode(text).ids].sum()) == len(text.encode())
    assert len(sizes) == VOCAB_SIZE
    assert sizes[:3].tolist() == [0, 0, 0]


def test_training_again_gives_the_same_tokenizer(make_corpus: Callable[[], Path]) -> None:
    folder = make_corpus()
    first, second = (train_tokenizer(folder, 400) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert [first.token_to_id(token) for token in (BOS, EOS, PAD)] == [0, 1, 2]
    write_tokenizer(first, folder, 512)
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).to_str() == first.to_str()
