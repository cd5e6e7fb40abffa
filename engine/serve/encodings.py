"""Routed experts in the two encodings other engines use, written and read.

    npy     base64 of a NumPy file, (rows, layers, top_k); vLLM's `routed_experts`
    int32   base64 of little-endian int32, flat in the same order; SGLang's `routed_experts`

Rows are prompt + output - 1: the last token never went through the model. `-1` is "no expert".
Source: vLLM, `entrypoints/openai/completion/protocol.py`; SGLang, `--enable-return-routed-experts`.
"""

from __future__ import annotations

import base64
import binascii
import io

import numpy as np
import numpy.typing as npt

from engine.errors import RequestError

Ids = npt.NDArray[np.integer]
_BYTE = 256


def to_npy(ids_TLK: Ids, num_experts: int) -> str:
    """Encode as a NumPy file: uint8 where all ids fit and each row has all its experts, else int16.

    Raises:
        RequestError: an id is not below `num_experts`.
    """
    _check(ids_TLK, num_experts)
    fits = num_experts <= _BYTE and not (ids_TLK < 0).any()
    file = io.BytesIO()
    np.save(file, ids_TLK.astype(np.uint8 if fits else np.int16), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode("ascii")


def from_npy(text: str) -> Ids:
    """Decode `to_npy`.

    Raises:
        RequestError: it is not such a text.
    """
    try:
        ids: Ids = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError, binascii.Error):
        raise RequestError("the routed experts are not a base64 NumPy file.") from None
    if ids.ndim != 3 or ids.dtype.kind not in "iu":
        raise RequestError(f"routed experts of shape {ids.shape} must be (rows, layers, top_k).")
    return ids.astype(np.int16)


def to_int32(ids_TLK: Ids, num_experts: int) -> str:
    """Encode as flat little-endian int32.

    Raises:
        RequestError: an id is not below `num_experts`.
    """
    _check(ids_TLK, num_experts)
    return base64.b64encode(ids_TLK.astype("<i4").tobytes()).decode("ascii")


def from_int32(text: str, num_layers: int, top_k: int) -> Ids:
    """Decode `to_int32` of a model of this shape.

    Raises:
        RequestError: it is not such a text, or of another shape.
    """
    try:
        raw = base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        raise RequestError("the routed experts are not base64.") from None
    row_bytes = 4 * num_layers * top_k
    if not row_bytes or len(raw) % row_bytes:
        raise RequestError(
            f"{len(raw)} bytes of routed experts are no rows of {num_layers} layers x {top_k}."
        )
    return np.frombuffer(raw, "<i4").reshape(-1, num_layers, top_k).astype(np.int16)


def _check(ids: Ids, num_experts: int) -> None:
    if ids.size and not (-1 <= int(ids.min()) and int(ids.max()) < num_experts):
        raise RequestError(
            f"expert ids from {ids.min()} to {ids.max()} must lie between -1 and {num_experts - 1}."
        )
