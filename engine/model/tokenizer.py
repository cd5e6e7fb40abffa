"""Text to token ids and back.

Encoding is the `tokenizers` library's. Decoding goes through the bytes of each token, so that it
can be done token by token (`engine.model.detokenizer`) at the cost of a table look-up.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as HfTokenizer

from engine.errors import CheckpointError

MAX_IDS = 1 << 22
"""More than any vocabulary has."""


class Tokenizer:
    """The byte-level tokenizer of one model folder."""

    def __init__(self, folder: str | Path) -> None:
        """Read `tokenizer.json`.

        Raises:
            CheckpointError: the file is missing, damaged, or not a byte-level tokenizer's.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; a model folder needs its tokenizer.")
        try:
            self._hf = HfTokenizer.from_file(str(path))
        except Exception as broken:  # the library raises bare Exception
            raise CheckpointError(f"{path} cannot be read: {broken}.") from None
        # The library's own writer walks through all ids up to the highest one.
        if (last := max(self._hf.get_vocab().values(), default=0)) >= MAX_IDS:
            raise CheckpointError(
                f"{path}: token id {last} is beyond {MAX_IDS - 1}; it is damaged."
            )
        if "ByteLevel" not in json.dumps(json.loads(self._hf.to_str())["decoder"]):
            raise CheckpointError(
                f"{path} is not a byte-level tokenizer; this engine decodes only those."
            )
        # A folder saved after training may still say how its batches were cut and filled.
        self._hf.no_truncation()
        self._hf.no_padding()
        self._bytes = _byte_table(self._hf, path)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id, special tokens included."""
        return max(self._bytes, default=-1) + 1

    def same_tokens(self, other: Tokenizer) -> bool:
        """Say whether every id stands for the same bytes in both."""
        return self._bytes == other._bytes

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, with the special tokens the model expects (bos first)."""
        ids: list[int] = self._hf.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without special tokens; broken bytes show as U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; none for a special one or an id the vocabulary lacks."""
        return self._bytes.get(token_id, b"")

    def token(self, token_id: int) -> str:
        """Return one token as text for people: special ones by name, broken bytes as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace") or str(
            self._hf.id_to_token(token_id) or ""
        )


def _byte_table(hf: HfTokenizer, path: Path) -> dict[int, bytes]:
    """Return the bytes of every token; added tokens stand for their text, special ones for none."""
    byte_of = {char: byte for byte, char in enumerate(_byte_alphabet())}
    added = hf.get_added_tokens_decoder()
    table = {}
    for token, token_id in hf.get_vocab(with_added_tokens=True).items():
        if token_id in added:
            table[token_id] = b"" if added[token_id].special else token.encode()
        elif byte_of.keys() >= set(token):
            table[token_id] = bytes(byte_of[char] for char in token)
        else:
            raise CheckpointError(f"{path}: token {token_id} ({token!r}) is not made of bytes.")
    return table


def _byte_alphabet() -> list[str]:
    """Return the printable character that stands for each byte in a byte-level vocabulary.

    Printable Latin-1 bytes stand for themselves; the others, in order, for U+0100 and up.

    Source: GPT-2 (Radford et al., 2019), section 2.2.
    """
    itself = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in itself else next(others)) for byte in range(256)]
