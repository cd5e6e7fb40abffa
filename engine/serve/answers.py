"""Answers in OpenAI's shapes, whole or piece by piece, with the field `routing` where asked for."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from engine.model.sampler import Logprobs
from engine.model.tokenizer import Tokenizer
from engine.routing.speculation import Figures
from engine.runtime.results import Completion
from engine.serve.loop import Piece
from engine.serve.service import Service, Work

Json = dict[str, Any]


class Answer:
    """What both kinds of answer have in common; one is made for each call."""

    prefix = whole_object = chunk_object = ""

    def __init__(self, service: Service, work: Work) -> None:
        self._service, self._work = service, work
        self._tokenizer = service.engine.tokenizer
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._num_output = self._num_cached = 0
        self._drafts: Figures | None = None

    def opening(self) -> list[Json]:
        """Return the chunks that come before the first token."""
        return []

    def chunk(self, piece: Piece) -> Json:
        """Return what a stream says of one piece."""
        self._num_output += len(piece.output.token_ids)
        done = piece.output.completion
        self._account(done)
        choice = {
            "index": piece.index,
            **self._gained(piece),
            "finish_reason": done.finish_reason if done else None,
        }
        if piece.routing is not None:
            choice["routing"] = piece.routing
        return self._framed(self.chunk_object, [choice])

    def closing(self) -> Json:
        """Return the last chunk, which carries the usage."""
        return {**self._framed(self.chunk_object, []), "usage": self._usage()}

    def whole(self, last: Sequence[Piece]) -> Json:
        """Return the complete answer from each completion's last piece."""
        choices = []
        for piece in last:
            done = piece.output.completion
            assert done is not None
            choice = {
                "index": piece.index,
                **self._all(done.text, done.logprobs),
                "finish_reason": done.finish_reason,
            }
            if piece.routing is not None:
                choice["routing"] = piece.routing
            if done.logits_sha256 is not None:
                choice["logits_sha256"] = done.logits_sha256
            choices.append(choice)
            self._num_output += len(done.token_ids)
            self._account(done)
        return {**self._framed(self.whole_object, choices), "usage": self._usage()}

    def _account(self, done: Completion | None) -> None:
        """Add what the usage tells of a completion that has ended."""
        if done is None:
            return
        self._num_cached += done.reused_tokens
        if done.draft is not None:
            self._drafts = self._drafts or Figures()
            self._drafts.add(done.draft)

    def _gained(self, piece: Piece) -> Json:
        raise NotImplementedError

    def _all(self, text: str, entries: Sequence[Logprobs]) -> Json:
        raise NotImplementedError

    def _framed(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._service.config.model_name,
            "system_fingerprint": f"table-{self._service.engine.table.version}",
            "choices": choices,
        }

    def _usage(self) -> Json:
        prompt, drafts = self._work.num_prompt_tokens, self._drafts
        usage: Json = {
            "prompt_tokens": prompt,
            "completion_tokens": self._num_output,
            "total_tokens": prompt + self._num_output,
            "prompt_tokens_details": {"cached_tokens": min(self._num_cached, prompt)},
        }
        if drafts is not None:
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": drafts.accepted,
                "rejected_prediction_tokens": drafts.proposed - drafts.accepted,
            }
        return usage


class CompletionAnswer(Answer):
    """`text_completion`."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, service: Service, work: Work) -> None:
        super().__init__(service, work)
        self._offsets: defaultdict[int, int] = defaultdict(int)

    def _gained(self, piece: Piece) -> Json:
        output = piece.output
        said = None
        if output.logprobs:
            said = completion_logprobs(output.logprobs, self._tokenizer, self._offsets[piece.index])
            self._offsets[piece.index] += sum(map(len, said["tokens"]))
        return {"text": output.delta, "logprobs": said}

    def _all(self, text: str, entries: Sequence[Logprobs]) -> Json:
        said = completion_logprobs(entries, self._tokenizer) if entries else None
        return {"text": text, "logprobs": said}


class ChatAnswer(Answer):
    """`chat.completion`."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> list[Json]:
        """Return who speaks, for each choice."""
        return [
            self._framed(
                self.chunk_object,
                [
                    {
                        "index": index,
                        "delta": {"role": "assistant", "content": ""},
                        "logprobs": None,
                        "finish_reason": None,
                    }
                ],
            )
            for index in range(len(self._work.specs))
        ]

    def _gained(self, piece: Piece) -> Json:
        output = piece.output
        said = chat_logprobs(output.logprobs, self._tokenizer) if output.logprobs else None
        delta = {"content": output.delta} if output.delta or not output.finished else {}
        return {"delta": delta, "logprobs": said}

    def _all(self, text: str, entries: Sequence[Logprobs]) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        said = chat_logprobs(entries, self._tokenizer) if entries else None
        return {"message": message, "logprobs": said}


def completion_logprobs(entries: Sequence[Logprobs], tokenizer: Tokenizer, offset: int = 0) -> Json:
    """Return log-probabilities as `text_completion` has them; `offset` is the first token's."""
    tokens = [tokenizer.token(entry.token_id) for entry in entries]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [
            {tokenizer.token(token): value for token, value in reversed(entry.top)}
            for entry in entries
        ],
        "text_offset": offsets,
    }


def chat_logprobs(entries: Sequence[Logprobs], tokenizer: Tokenizer) -> Json:
    """Return log-probabilities as `chat.completion` has them."""

    def one(token_id: int, value: float) -> Json:
        return {
            "token": tokenizer.token(token_id),
            "logprob": value,
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content = [
        {
            **one(entry.token_id, entry.logprob),
            "top_logprobs": [one(token, value) for token, value in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}
