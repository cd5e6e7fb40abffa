"""LibreOffice help pages: the same pages in five languages (MPL-2.0)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from engine.errors import ConfigError

BLANKS = re.compile(r"[ \t\r\n\u00a0]+")
DROPPED = "//*[contains(@class,'howtoget')]|//*[contains(@class,'relatedtopics')]|//script"
KEPT = "//div[@id='DisplayArea']//*[self::h1 or self::h2 or self::h3 or self::p]"


def pages(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (key, text) per page; paragraphs end with a newline; the key names no language.

    `…/help/de/text/swriter/guide/x.html` has the key `office/swriter/guide/x`.
    Raises: ConfigError when lxml is not installed.
    """
    try:
        from lxml import html
    except ImportError:
        raise ConfigError(
            "lxml is missing, which reads the help pages; install the `dev` extra."
        ) from None
    parser = html.HTMLParser(encoding="utf-8")
    for path in sorted(folder.glob("usr/share/libreoffice/help/*/text/**/*.html")):
        root = html.parse(str(path), parser).getroot()
        for element in root.xpath(DROPPED):
            element.drop_tree()
        paragraphs = [squeeze(element.text_content()) for element in root.xpath(KEPT)]
        paragraphs = [paragraph for paragraph in paragraphs if len(paragraph) > 1]
        page = path.as_posix().split("/text/")[1].removesuffix(".html")
        yield f"office/{page}", "\n".join(paragraphs)


def squeeze(text: str) -> str:
    """Turn every run of blanks into one space and trim the ends."""
    return BLANKS.sub(" ", text).strip()
