"""The bundled corpus as documents: which domains there are, how they are split, how to read them.

One compressed file of JSON lines per domain; each line is a Document. Reading is lazy: a caller
that wants three documents unpacks no more than it needs. Called by the trainer, the report, the
tests and the live traffic.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.errors import ConfigError

DOMAINS = ("en", "de", "fr", "es", "zh", "py", "math", "num")
SPLITS = ("train", "heldout")
HELD_OUT_IN = 16
"""One document key in so many is held out."""

CORPUS = Path(__file__).resolve().parents[2] / "data" / "corpus"


@dataclass(frozen=True, slots=True)
class Document:
    """One text of the corpus."""

    source: str
    """Name of the source, e.g. `libreoffice-help`; its licence stands in data/corpus/NOTICE."""
    key: str
    """What the text is, the same in every language it was translated to."""
    split: str
    """`train` or `heldout`."""
    text: str


def documents(domain: str, split: str = "train", folder: Path = CORPUS) -> Iterator[Document]:
    """Yield the documents of one domain and split in the file's order.

    Raises: ConfigError for an unknown domain or split, or when the corpus file is missing.
    """
    if domain not in DOMAINS:
        raise ConfigError(f"domain ({domain!r}) is unknown; use one of {', '.join(DOMAINS)}.")
    if split not in SPLITS:
        raise ConfigError(f"split ({split!r}) is unknown; use one of {', '.join(SPLITS)}.")
    path = corpus_file(domain, folder)
    if not path.is_file():
        raise ConfigError(
            f"corpus file {path} is missing; rebuild it with `python -m engine.train.corpus`."
        )
    return _read(path, split)


def split_of(key: str) -> str:
    """Name the split of a document key: `heldout` for one key in 16, by hash.

    The language is not part of a key, so a parallel document is held out in every language. What
    follows a `#` numbers the pieces of one work that must stay together, and does not count.
    """
    unit = key.partition("#")[0]
    digest = hashlib.sha256(f"split:{unit}".encode()).digest()
    held_out = int.from_bytes(digest[:8], "big") % HELD_OUT_IN == 0
    return "heldout" if held_out else "train"


def corpus_file(domain: str, folder: Path = CORPUS) -> Path:
    """Name the file that holds one domain."""
    return folder / f"{domain}.jsonl.xz"


def write_documents(path: Path, written: list[Document]) -> None:
    """Write documents as compressed JSON lines, the same bytes for the same documents."""
    lines = (json.dumps(asdict(document), ensure_ascii=False) + "\n" for document in written)
    path.write_bytes(lzma.compress("".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME))


def _read(path: Path, split: str) -> Iterator[Document]:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            document = Document(**json.loads(line))
            if document.split == split:
                yield document
