"""What an answer must look like: OpenAI's fields, and our field `routing` held against itself."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engine.errors import RequestError
from engine.serve.encodings import from_int32, from_npy
from workbench.acceptance.expectations import NotAcceptedError, ensure

FINISHED = ("stop", "length")


def check_completion(answer: Any, *, chat: bool = False) -> Mapping[str, Any]:
    """Check a whole answer and return its first choice.

    Raises:
        NotAcceptedError: a field is missing or of another type.
    """
    kind = "chat.completion" if chat else "text_completion"
    _fields(answer, "the answer", id=str, object=str, created=int, model=str, choices=list,
            usage=dict)  # fmt: skip
    ensure(answer["object"] == kind, f"object is {answer['object']!r}, not {kind!r}")
    ensure(len(answer["choices"]) == 1, f"{len(answer['choices'])} choices instead of 1")
    choice: Mapping[str, Any] = answer["choices"][0]
    _fields(choice, "the choice", index=int, finish_reason=str)
    ensure(choice["finish_reason"] in FINISHED, f"finish_reason is {choice['finish_reason']!r}")
    if chat:
        _fields(choice, "the choice", message=dict)
        _fields(choice["message"], "the message", role=str, content=str)
    else:
        _fields(choice, "the choice", text=str)
    usage = answer["usage"]
    _fields(usage, "usage", prompt_tokens=int, completion_tokens=int, total_tokens=int)
    ensure(
        usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"],
        "usage does not add up",
    )
    ensure(usage["prompt_tokens"] > 0, "usage counts no prompt token")
    return choice


def check_stream(lines: Sequence[str], wanted: str) -> int:
    """Check a streamed completion against the whole one's text; return the number of chunks.

    Raises:
        NotAcceptedError: a line is no event, the end is missing, or the text is another.
    """
    ensure(bool(lines) and lines[-1] == "data: [DONE]", "the stream does not end with [DONE]")
    text, reason = "", None
    for line in lines[:-1]:
        ensure(line.startswith("data: "), "a line of the stream is no event")
        try:
            chunk = json.loads(line.removeprefix("data: "))
        except ValueError:
            raise NotAcceptedError("an event of the stream is no JSON") from None
        _fields(chunk, "a chunk", id=str, object=str, choices=list)
        for choice in chunk["choices"]:
            _fields(choice, "a chunk's choice", text=str)
            text += choice["text"]
            reason = choice.get("finish_reason") or reason
    ensure(reason in FINISHED, f"the stream's finish_reason is {reason!r}")
    ensure(text == wanted, "the streamed text differs from the whole one")
    return len(lines) - 1


def check_routing(
    routing: Any, usage: Mapping[str, int], shape: Mapping[str, Any]
) -> dict[str, Any]:
    """Check the field `routing` of a choice; return what it says in short.

    Prompt tokens that a service says it did not compute must come first and have no experts.

    Raises:
        NotAcceptedError: a row is missing, an id is out of range, or two parts disagree.
    """
    _fields(routing, "routing", layers=list, tokens=list, summary=dict, encodings=dict, top_k=int)
    layers, top_k, experts = len(routing["layers"]), routing["top_k"], shape["experts"]
    rows = usage["prompt_tokens"] + max(0, usage["completion_tokens"] - 1)
    ensure(layers == len(shape["moe_layers"]), f"routing tells of {layers} layers")
    ensure(len(routing["tokens"]) == rows, f"{len(routing['tokens'])} routed rows, not {rows}")
    _fields(routing["summary"], "the summary", rows=int, expert_counts=list, balance=dict,
            table_version=int, overhead_share=float)  # fmt: skip
    reused = routing["summary"].get("reused_rows", 0)
    ensure(reused in range(usage["prompt_tokens"]), f"{reused!r} rows are said to be reused")
    first, routed = routing["tokens"][:reused], routing["tokens"][reused:]
    ensure(
        all(token["experts"] is token["weights"] is None for token in first),
        "a reused row has experts",
    )
    for token in routed:
        _fields(token, "a routed token", index=int, id=int, experts=list, weights=list)
    ids = np.array([token["experts"] for token in routed])
    weights = np.array([token["weights"] for token in routed], dtype=float)
    run = rows - reused
    ensure(ids.shape == weights.shape == (run, layers, top_k), "routed rows differ in shape")
    ensure(bool(((ids >= 0) & (ids < experts)).all()), "an expert id is out of range")
    ensure(bool((np.sort(ids)[..., 1:] != np.sort(ids)[..., :-1]).all()), "an expert came twice")
    ensure(bool(np.isfinite(weights).all() and (weights >= 0).all()), "a weight is not finite")
    try:
        others = [
            from_npy(routing["encodings"].get("npy", "")),
            from_int32(routing["encodings"].get("int32", ""), layers, top_k),
        ]
    except RequestError as wrong:
        raise NotAcceptedError(str(wrong).rstrip(".")) from None
    whole = np.concatenate([np.full((reused, layers, top_k), -1), ids])
    ensure(all(np.array_equal(whole, other) for other in others), "the encodings disagree")
    counts = np.array(routing["summary"]["expert_counts"])
    ensure(
        counts.shape == (layers, experts) and bool((counts.sum(axis=1) == run * top_k).all()),
        "the counts do not sum to rows x top_k",
    )
    return {"rows": rows, "layers": layers, "top_k": top_k}


def _fields(value: Any, name: str, **wanted: type) -> None:
    """Check that `value` is an object with these fields of these types; a bool is no number."""
    ensure(isinstance(value, Mapping), f"{name} is no object")
    for field, kind in wanted.items():
        found = value.get(field)
        number = isinstance(found, int | float) and math.isfinite(found)
        good = number if kind is float else isinstance(found, kind)
        ensure(good and not isinstance(found, bool), f"{name} lacks {field}, or it is of no use")
