"""One request's tokens to text as they come.

Text that could still change is held back: bytes of an unfinished character, and an ending that may
be the beginning of a stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from engine.model.tokenizer import Tokenizer


class Detokenizer:
    """Streams text that never ends inside a character and never leaks a stop string.

    With stop string ``DEFGHIJ`` the tokens DEF, G, HI, J give nothing; DEF, G, X give ``DEFGX``.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._longest = max(map(len, self._stop), default=1)
        self._sent = 0
        self.text = ""
        """The text so far, what is held back included; cut at the stop string once it is found."""
        self.stopped = False
        """Whether a stop string was found."""

    def push(self, token_id: int) -> str:
        """Take one token and return the text that is now certain."""
        return self._append(self._utf8.decode(self._tokenizer.token_bytes(token_id)))

    def flush(self) -> str:
        """Return all that was held: nothing more will come."""
        rest = "" if self.stopped else self._append(self._utf8.decode(b"", final=True))
        return rest + self._release(len(self.text))

    def _append(self, new: str) -> str:
        if not self._stop:
            self.text += new
            return self._release(len(self.text))
        start = max(0, len(self.text) - self._longest + 1)
        self.text += new
        found = [at for stop in self._stop if (at := self.text.find(stop, start)) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True
        return self._release(len(self.text) - self._num_held())

    def _num_held(self) -> int:
        """Length of the longest ending with which a stop string may begin."""
        if self.stopped:
            return 0
        lengths = (
            size
            for stop in self._stop
            for size in range(min(len(stop) - 1, len(self.text)), 0, -1)
            if self.text.endswith(stop[:size])
        )
        return max(lengths, default=0)

    def _release(self, end: int) -> str:
        delta = self.text[self._sent : end]
        self._sent = max(self._sent, end)
        return delta
