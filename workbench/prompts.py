"""The text to run: from the command line, a file or stdin; and a few prompts of our own."""

from __future__ import annotations

import sys
from pathlib import Path

from engine.errors import RequestError

MAX_BYTES = 16 << 20
"""More text than this is a mistake: no context is that long."""

SAMPLES: tuple[tuple[str, str], ...] = (
    ("en", "The weather was fine when we walked to the old house near the river"),
    ("de", "Wählen Sie im Menü den Befehl, mit dem Sie die Tabelle öffnen möchten"),
    ("fr", "Pour ouvrir le document, choisissez la commande dans le menu Fichier"),
    ("es", "En el principio estaba el camino y la gente de la tierra lo sabía"),
    ("zh", "在文档中选择要更改的单元格，然后打开对话框"),
    ("py", "def read_lines(path):\n    with open(path) as file:\n        return"),
    ("math", "If A is a subset of B and B is a subset of C, then A is a subset of C"),
    ("num", "12 + 30 = 42\n17 + 25 = 42\n8 + 5 ="),
)
"""One prompt for each domain of the bundled model: (domain, text)."""


def read_prompt(text: str | None, file: Path | None = None) -> str:
    """Return the prompt given as an argument, as `-` for stdin, or as a file.

    One line end at the very end of stdin or a file is not part of the prompt.

    Raises:
        RequestError: none or both are given, the file cannot be read, or the text is empty, too
            long to be a prompt, or not UTF-8.
    """
    if (text is None) == (file is None):
        raise RequestError("give the prompt either as TEXT (- reads stdin) or as --prompt-file.")
    if file is not None:
        prompt = _decoded(f"--prompt-file {file}", _read(file))
    elif text == "-":
        if sys.stdin is None:
            raise RequestError("stdin is closed; pipe the prompt into it or give it as TEXT.")
        prompt = _decoded("stdin", sys.stdin.buffer.read(MAX_BYTES + 1))
    else:
        assert text is not None
        prompt = text
    return checked(prompt)


def read_prompts(texts: list[str], file: Path | None) -> list[str]:
    """Return several prompts: the arguments, or the lines of a file that are not empty.

    Raises:
        RequestError: both are given, the file cannot be read, or there is no prompt in it.
    """
    if file is None:
        return [checked(text) for text in texts]
    if texts:
        raise RequestError("give the prompts either as TEXT or as --prompt-file, not both.")
    lines = _decoded(f"--prompt-file {file}", _read(file)).splitlines()
    prompts = [checked(line) for line in lines if line.strip()]
    if not prompts:
        raise RequestError(f"--prompt-file {file} holds no line of text; write one prompt a line.")
    return prompts


def checked(prompt: str) -> str:
    """Return `prompt` if it can be one.

    Raises:
        RequestError: it is empty or holds bytes that are not UTF-8.
    """
    if not prompt:
        raise RequestError("the prompt is empty; give at least one character of text.")
    try:
        prompt.encode()
    except UnicodeEncodeError as wrong:
        raise RequestError(
            f"the prompt is not UTF-8 at character {wrong.start}; pass UTF-8 text."
        ) from None
    return prompt


def _read(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(MAX_BYTES + 1)
    except OSError as wrong:
        raise RequestError(
            f"--prompt-file {file} cannot be read: {wrong.strerror or wrong}."
        ) from None


def _decoded(source: str, raw: bytes) -> str:
    if len(raw) > MAX_BYTES:
        raise RequestError(f"{source} is longer than {MAX_BYTES} bytes; a prompt must be shorter.")
    try:
        text = raw.decode()
    except UnicodeDecodeError as wrong:
        where = f"{source} is not UTF-8 at byte {wrong.start}"
        raise RequestError(f"{where}; pass UTF-8 text.") from None
    return text.removesuffix("\n").removesuffix("\r")
