"""One row of one sequence through the draft, in numpy.

Nine of ten passes of a draft are of one row, some fifty small operations a layer around products
of a few microseconds. numpy's calls cost a third of torch's: 0.2 against 0.33 ms a pass on a busy
core. Same weights, same memory as `engine.runtime.draft.network`, which calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

Array = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class SingleLayer:
    """One layer's weights, norms folded in; the heads' norms are folded into the rotation."""

    qkv: Array
    out: Array
    gate_up: Array
    down: Array
    cos_PHd: Array
    """(positions, H + Hkv, hd): the rotation's cosine times the norm's weight."""
    sin_PHd: Array
    """Likewise the sine, for the halves of a head changed over."""


def single_layer(
    weights: Sequence[Tensor], norm_Hd: Tensor, cos_P1d: Tensor, sin_P1d: Tensor
) -> SingleLayer:
    """Lay out a layer: `weights` are qkv, out, gate_up and down, `norm_Hd` of queries and keys."""
    turned_Hd = norm_Hd.roll(norm_Hd.shape[-1] // 2, dims=-1)
    qkv, out, gate_up, down = (np.ascontiguousarray(weight.numpy()) for weight in weights)
    return SingleLayer(
        qkv, out, gate_up, down, (cos_P1d * norm_Hd).numpy(), (sin_P1d * turned_Hd).numpy()
    )


class SingleRow:
    """The draft for one row at a time."""

    def __init__(
        self,
        embed_VD: Tensor,
        head_VD: Tensor,
        layers: Sequence[SingleLayer],
        heads: tuple[int, int],
        eps: float,
    ) -> None:
        """Take the weights; `heads` are the numbers of query heads and of key heads."""
        self._embed_VD = embed_VD.numpy()
        self._head_VD = np.ascontiguousarray(head_VD.numpy())
        self._layers, self._eps = layers, eps
        self._num_heads, self._num_kv_heads = heads
        self._turned_Hd = np.empty_like(layers[0].cos_PHd[0])

    def run(self, token_id: int, place: int, keys_LGSd: Array, values_LGSd: Array) -> Array:
        """Take in one token at position `place`; returns (D,) for `logits`, fills both caches."""
        x_D: Array = self._embed_VD[token_id]
        for layer, keys_GSd, values_GSd in zip(self._layers, keys_LGSd, values_LGSd, strict=True):
            qkv = layer.qkv.dot(self._normed(x_D))
            mixed = self._attend(layer, qkv, place, keys_GSd, values_GSd)
            x_D = x_D + layer.out.dot(mixed)
            gate_up = layer.gate_up.dot(self._normed(x_D))
            gate, up = gate_up[: len(gate_up) // 2], gate_up[len(gate_up) // 2 :]
            gate = gate / (1 + np.exp(-gate))
            gate *= up
            x_D = x_D + layer.down.dot(gate)
        return x_D

    def logits(self, x_D: Array) -> Array:
        """Return the (V,) logits of what `run` returned."""
        logits_V: Array = self._head_VD.dot(self._normed(x_D))
        return logits_V

    def _normed(self, x_D: Array) -> Array:
        normed_D: Array = x_D * (float(x_D.dot(x_D)) / len(x_D) + self._eps) ** -0.5
        return normed_D

    def _attend(
        self, layer: SingleLayer, qkv: Array, place: int, keys_GSd: Array, values_GSd: Array
    ) -> Array:
        """Rotate the heads, remember key and value, and attend to all positions up to `place`."""
        turned_Hd, (num_all, width) = self._turned_Hd, self._turned_Hd.shape
        heads_Hd = qkv[: num_all * width].reshape(num_all, width)
        scale_H = np.einsum("hd,hd->h", heads_Hd, heads_Hd)
        scale_H /= width
        scale_H += self._eps
        np.sqrt(scale_H, out=scale_H)
        turned_Hd[:, : width // 2] = heads_Hd[:, width // 2 :]
        turned_Hd[:, width // 2 :] = heads_Hd[:, : width // 2]
        turned_Hd *= layer.sin_PHd[place]
        heads_Hd = heads_Hd * layer.cos_PHd[place]
        heads_Hd += turned_Hd
        heads_Hd /= scale_H[:, None]
        num_heads, num_kv_heads = self._num_heads, self._num_kv_heads
        keys_GSd[:, place] = heads_Hd[num_heads:]
        values_GSd[:, place] = qkv[num_all * width :].reshape(num_kv_heads, width)
        group = num_heads // num_kv_heads
        mixed_Hd = np.empty((num_heads, width), np.float32)
        for number in range(num_kv_heads):
            own = slice(number * group, (number + 1) * group)
            scores = heads_Hd[own].dot(keys_GSd[number, : place + 1].T)
            scores -= scores.max()
            np.exp(scores, out=scores)
            scores /= scores.sum(axis=1, keepdims=True)
            mixed_Hd[own] = scores.dot(values_GSd[number, : place + 1])
        return mixed_Hd.reshape(-1)
