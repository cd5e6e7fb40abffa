from __future__ import annotations

import lzma
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.train.corpus.build import MIN_REPEATED
from engine.train.data import CORPUS, DOMAINS, SPLITS, Document, documents, split_of

LICENSED = {
    "libreoffice-help",
    "austen-novels",
    "bible-web",
    "bible-rv1909",
    "tang-poems",
    "python-stdlib",
    "set.mm",
    "arithmetic",
}

Corpus = dict[str, dict[str, list[Document]]]


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return {
        domain: {split: list(documents(domain, split)) for split in SPLITS} for domain in DOMAINS
    }


def test_every_document_is_in_the_split_of_its_key(corpus: Corpus) -> None:
    for splits in corpus.values():
        for split, found in splits.items():
            assert {split_of(document.key) for document in found} == {split}


def test_a_key_is_held_out_in_every_language_or_in_none(corpus: Corpus) -> None:
    splits_of: dict[str, set[str]] = defaultdict(set)
    languages: dict[str, set[str]] = defaultdict(set)
    for domain, splits in corpus.items():
        for split, found in splits.items():
            for document in found:
                splits_of[document.key.partition("#")[0]].add(split)
                languages[document.key].add(domain)
    assert all(len(splits) == 1 for splits in splits_of.values())
    parallel = [key for key, found in languages.items() if len(found) == 5]
    assert len(parallel) > 500
    assert sum(split_of(key) == "heldout" for key in parallel) > 20


def test_a_split_that_looks_at_the_language_would_be_noticed() -> None:
    keys = [f"office/page{number}" for number in range(400)]
    assert any(split_of(f"de:{key}") != split_of(f"fr:{key}") for key in keys)


def test_about_one_key_in_sixteen_is_held_out() -> None:
    held_out = sum(split_of(f"key/{number}") == "heldout" for number in range(16_000))
    assert 900 < held_out < 1100


def test_pieces_of_one_work_share_a_split() -> None:
    for number in range(50):
        assert len({split_of(f"bible/{number}#{piece}") for piece in range(20)}) == 1


@pytest.mark.parametrize("domain", DOMAINS)
def test_no_long_paragraph_is_both_trained_and_held_out(corpus: Corpus, domain: str) -> None:
    if domain == "py":
        trained = {document.text for document in corpus[domain]["train"]}
        assert not trained & {document.text for document in corpus[domain]["heldout"]}
        return
    paragraphs = {
        split: {
            line
            for document in found
            for line in document.text.split("\n")
            if len(line) >= MIN_REPEATED or domain == "num"
        }
        for split, found in corpus[domain].items()
    }
    both = paragraphs["train"] & paragraphs["heldout"]
    # Two theorems of set.mm may carry the same comment; everything else is seen once.
    assert len(both) <= (0.05 * len(paragraphs["heldout"]) if domain == "math" else 0)


def test_every_domain_has_enough_of_both_splits(corpus: Corpus) -> None:
    for splits in corpus.values():
        size = {split: sum(len(d.text.encode()) for d in found) for split, found in splits.items()}
        assert size["train"] > 900_000
        assert size["heldout"] > 70_000
    assert len(corpus["py"]["heldout"]) > 9


def test_every_source_is_described_with_its_licence(corpus: Corpus) -> None:
    found = {d.source for splits in corpus.values() for split in splits.values() for d in split}
    assert found == LICENSED
    notice, readme = (
        (CORPUS / "NOTICE").read_text(encoding="utf-8"),
        (CORPUS / "README.md").read_text(encoding="utf-8"),
    )
    for source in LICENSED:
        assert f"\n{source} (" in notice
        assert f"| {source} |" in readme
    for name in ("MPL-2.0", "CC0-1.0", "PSF-2.0", "MIT-janeaustenr", "MIT-chinese-poetry"):
        assert f"licences/{name}.txt" in notice
        assert (CORPUS / "licences" / f"{name}.txt").stat().st_size > 1000


def test_an_unknown_domain_or_split_is_refused_before_reading() -> None:
    with pytest.raises(ConfigError, match=r"domain \('it'\) is unknown; use one of en, de"):
        documents("it")
    with pytest.raises(ConfigError, match=r"split \('test'\) is unknown; use one of train"):
        documents("de", "test")


def test_a_missing_corpus_names_the_command_that_rebuilds_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"de\.jsonl\.xz is missing; rebuild it with"):
        documents("de", "train", tmp_path)


def test_reading_a_few_documents_does_not_unpack_the_file(
    make_corpus: Callable[[], Path],
) -> None:
    folder = make_corpus()
    whole = lzma.decompress((folder / "de.jsonl.xz").read_bytes())
    # The last line is damaged: only a reader that goes on would stumble.
    (folder / "de.jsonl.xz").write_bytes(lzma.compress(whole + b"not json\n"))
    reader = documents("de", "train", folder)
    assert next(reader).key == "de/1"
    with pytest.raises(ValueError):
        list(reader)
