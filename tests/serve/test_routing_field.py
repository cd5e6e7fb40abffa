"""The field `routing` of an answer, and the two encodings of other engines."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest

from engine.errors import RequestError
from engine.serve.encodings import from_int32, from_npy, to_int32, to_npy


@pytest.mark.parametrize(("max_tokens", "rows"), [(0, 5), (1, 5), (2, 6), (7, 11)])
def test_row_i_belongs_to_token_i(complete, max_tokens, rows):
    prompt = [5, 60, 700, 800, 9]
    answer = complete(prompt, max_tokens=max_tokens, ignore_eos=True, routing=True).json()
    routing = answer["choices"][0]["routing"]
    assert [token["index"] for token in routing["tokens"]] == list(range(rows))
    assert [token["id"] for token in routing["tokens"]][:5] == prompt
    assert np.array([token["experts"] for token in routing["tokens"]]).shape == (rows, 4, 2)
    weights = np.array([token["weights"] for token in routing["tokens"]])
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-4)
    assert routing["summary"]["rows"] == rows


def test_the_whole_prompt_alone_is_routed_as_its_start_was(complete):
    long = complete([5, 60, 700, 800, 9, 11], max_tokens=3, routing=True).json()
    short = complete([5, 60, 700], max_tokens=0, routing=True).json()
    told = [one["choices"][0]["routing"]["tokens"] for one in (long, short)]
    assert [token["experts"] for token in told[0][:3]] == [token["experts"] for token in told[1]]


def test_chosen_layers_and_parts(complete):
    wish = {"layers": [3, 1], "encodings": True}
    whole = complete(routing={"encodings": True}).json()["choices"][0]["routing"]
    part = complete(routing=wish).json()["choices"][0]["routing"]
    assert whole["layers"] == [0, 1, 2, 3] and part["layers"] == [3, 1]
    for every, some in zip(whole["tokens"], part["tokens"], strict=True):
        assert some["experts"] == [every["experts"][3], every["experts"][1]]
        assert some["weights"] == [every["weights"][3], every["weights"][1]]
    counts = np.array(whole["summary"]["expert_counts"])
    assert part["summary"]["expert_counts"] == counts[[3, 1]].tolist()
    assert (counts.sum(axis=1) == whole["summary"]["rows"] * 2).all()
    assert part["encodings"] == whole["encodings"], "the encodings always hold all layers"
    ids = np.array([token["experts"] for token in whole["tokens"]])
    np.testing.assert_array_equal(from_npy(whole["encodings"]["npy"]), ids)
    np.testing.assert_array_equal(from_int32(whole["encodings"]["int32"], 4, 2), ids)
    without = complete(routing={"tokens": False}).json()["choices"][0]["routing"]
    assert "tokens" not in without and without["summary"]["rows"] == whole["summary"]["rows"]


def test_each_completion_of_a_call_and_the_end_of_a_stream_tell_their_own(client, complete):
    import json

    both = complete(["Der Server", "12 * 7 = "], routing=True).json()["choices"]
    body = {"model": "polyglot-moe", "prompt": ["Der Server", "12 * 7 = "], "max_tokens": 4,
            "temperature": 0, "stream": True, "routing": True}  # fmt: skip
    with client.stream("POST", "/v1/completions", json=body) as response:
        lines = [line[6:] for line in response.iter_lines() if line][:-1]
    choices = [json.loads(line)["choices"][0] for line in lines]
    last = {c["index"]: c for c in choices if c["finish_reason"]}
    assert sum("routing" in choice for choice in choices) == 2
    for index, choice in enumerate(both):
        assert choice["routing"]["tokens"] == last[index]["routing"]["tokens"]


def test_nothing_is_kept_for_those_who_did_not_ask(complete, server):
    assert "routing" not in complete().json()["choices"][0]
    assert not server.service.loop._collector._wanted


@pytest.mark.parametrize("num_experts", [1, 128, 255, 256, 257, 512])
def test_ids_of_every_width_survive(num_experts):
    ids = np.array([[[0, num_experts - 1]], [[num_experts - 1, 0]]], np.int16)
    with_none = ids.copy()
    with_none[0, 0, 1] = -1
    for given in (ids, with_none):
        np.testing.assert_array_equal(from_npy(to_npy(given, num_experts)), given)
        np.testing.assert_array_equal(from_int32(to_int32(given, num_experts), 1, 2), given)
    for encode in (to_npy, to_int32):
        with pytest.raises(RequestError, match="between -1"):
            encode(np.array([[[num_experts]]], np.int16), num_experts)


def test_the_encodings_are_the_other_engines_own():
    """(2 rows, 1 layer, top-2) of 8 experts: NumPy's own reader, and plain int32."""
    ids = np.array([[[3, 1]], [[7, 0]]], np.int16)
    array = np.load(io.BytesIO(base64.b64decode(to_npy(ids, 8))))
    assert array.dtype == np.uint8 and array.tolist() == ids.tolist()
    raw = base64.b64decode(to_int32(ids, 8))
    assert np.frombuffer(raw, "<i4").tolist() == [3, 1, 7, 0]


@pytest.mark.parametrize("text", ["", "!", "AAAA", base64.b64encode(b"\x93NUMPY").decode()])
def test_what_is_no_encoding_is_refused(text):
    with pytest.raises(RequestError):
        from_npy(text)


def test_int32_of_another_shape_is_refused():
    with pytest.raises(RequestError, match="no rows of"):
        from_int32(to_int32(np.zeros((1, 1, 3), np.int16), 8), 1, 2)
