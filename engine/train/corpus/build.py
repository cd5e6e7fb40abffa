"""From extracted texts to data/corpus: clean, cap, split, write, and describe what was written.

PLAN is the whole corpus on one screen: which package gives how many bytes to which domain, under
which licence. Within a source, documents are taken in the order of a hash of their key until the
cap, so that the same pages are taken in every language.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.train.corpus import arithmetic, libreoffice, metamath, novels, poems, stdlib, sword
from engine.train.corpus.packages import package_version, unpack
from engine.train.data import DOMAINS, Document, corpus_file, split_of, write_documents

Texts = Iterator[tuple[str, str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One package's contribution to one domain."""

    name: str
    domain: str
    package: str
    licence: str
    extract: Callable[[Path], Texts]
    max_bytes: int
    prose: bool = True
    """Paragraphs may be dropped one by one; code, formulas and problems are kept whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """What one source gave: sizes of text in bytes."""

    source: Source
    version: str
    num_documents: int
    train_bytes: int
    heldout_bytes: int


def _office(domain: str, language: str, max_bytes: int) -> Source:
    return Source(
        name="libreoffice-help",
        domain=domain,
        package=f"libreoffice-help-{language}",
        licence="MPL-2.0",
        extract=libreoffice.pages,
        max_bytes=max_bytes,
    )


PLAN = (
    _office("en", "en-us", 1_500_000),
    Source(
        name="austen-novels",
        domain="en",
        package="r-cran-janeaustenr",
        licence="public domain (package: MIT)",
        extract=novels.novels,
        max_bytes=900_000,
    ),
    Source(
        name="bible-web",
        domain="en",
        package="sword-text-web",
        licence="public domain",
        extract=sword.books,
        max_bytes=600_000,
    ),
    _office("de", "de", 2_700_000),
    _office("fr", "fr", 2_700_000),
    _office("es", "es", 2_000_000),
    Source(
        name="bible-rv1909",
        domain="es",
        package="sword-text-sparv",
        licence="public domain",
        extract=sword.books,
        max_bytes=700_000,
    ),
    _office("zh", "zh-cn", 2_100_000),
    Source(
        name="tang-poems",
        domain="zh",
        package="chinese-poetry",
        licence="public domain (package: MIT)",
        extract=poems.poems,
        max_bytes=500_000,
    ),
    Source(
        name="python-stdlib",
        domain="py",
        package="libpython3.11-stdlib",
        licence="PSF-2.0",
        extract=stdlib.modules,
        max_bytes=2_400_000,
        prose=False,
    ),
    Source(
        name="set.mm",
        domain="math",
        package="metamath-databases",
        licence="CC0-1.0",
        extract=metamath.statements,
        max_bytes=1_500_000,
        prose=False,
    ),
    Source(
        name="arithmetic",
        domain="num",
        package="generated",
        licence="Apache-2.0 (this project)",
        extract=lambda _: arithmetic.problems(1_000_000),
        max_bytes=1_100_000,
        prose=False,
    ),
)

MIN_CHARS = 80
MIN_REPEATED = 26
"""Shorter paragraphs (headings, "Example:") may repeat; longer ones are kept once a domain."""
RELEASE_NOTE = re.compile(r"LibreOffice .*[3-7]\.\d")
CHINESE = re.compile("[\u4e00-\u9fff]")


def build(work: Path, out: Path) -> list[Built]:
    """Build every domain from the packages in `work` and write one file per domain to `out`.

    Raises: ConfigError when a package is missing and cannot be downloaded.
    """
    out.mkdir(parents=True, exist_ok=True)
    english = _english_paragraphs(work)
    report = []
    for domain in DOMAINS:
        seen: set[str] = set()
        written: list[Document] = []
        for source in (source for source in PLAN if source.domain == domain):
            taken = list(_take(source, work, seen, english if domain != "en" else frozenset()))
            written += taken
            report.append(_describe(source, taken, work))
        write_documents(corpus_file(domain, out), written)
    return report


def _english_paragraphs(work: Path) -> frozenset[str]:
    texts = libreoffice.pages(unpack("libreoffice-help-en-us", work))
    return frozenset(line for _, text in texts for line in text.split("\n") if len(line) > 20)


def _take(
    source: Source, work: Path, seen: set[str], untranslated: frozenset[str]
) -> Iterator[Document]:
    folder = work if source.package == "generated" else unpack(source.package, work)
    used = 0
    for key, text in sorted(source.extract(folder), key=lambda item: _order(item[0])):
        if source.prose:
            text = _clean(text, source.domain, seen, untranslated)
        size = len(text.encode())
        if len(text) < MIN_CHARS or used + size > source.max_bytes:
            continue
        used += size
        yield Document(source=source.name, key=key, split=split_of(key), text=text)


def _order(key: str) -> bytes:
    return hashlib.sha256(f"order:{key}".encode()).digest()


def _clean(text: str, domain: str, seen: set[str], untranslated: frozenset[str]) -> str:
    kept = []
    for paragraph in text.split("\n"):
        long = len(paragraph) >= MIN_REPEATED
        left_english = paragraph in untranslated or (
            domain == "zh" and long and not CHINESE.search(paragraph)
        )
        release_note = len(paragraph) < 90 and RELEASE_NOTE.search(paragraph)
        if left_english or release_note or (long and paragraph in seen):
            continue
        seen.add(paragraph)
        kept.append(paragraph)
    return "\n".join(kept).strip()


def _describe(source: Source, taken: list[Document], work: Path) -> Built:
    sizes = {"train": 0, "heldout": 0}
    for document in taken:
        sizes[document.split] += len(document.text.encode())
    version = "-" if source.package == "generated" else package_version(source.package, work)
    return Built(
        source=source,
        version=version,
        num_documents=len(taken),
        train_bytes=sizes["train"],
        heldout_bytes=sizes["heldout"],
    )
