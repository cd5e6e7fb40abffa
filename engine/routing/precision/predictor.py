"""Predict which tokens suit INT8 in a layer, before the layer runs.

What depends on the token alone (whitelist, position, class) is looked up once a step for all layers
together; the layer before adds its gate margin and activation range. In the first MoE layer nothing
came before, so the look-up alone decides.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.kernels.quant import INT8, NATIVE
from engine.routing.precision.features import CLASSES, Float, UInt8
from engine.routing.precision.thresholds import Thresholds

Bool = npt.NDArray[np.bool_]


class Ahead(NamedTuple):
    """What is predicted at a step's start."""

    suits_LT: Bool
    """(L, T) whether a token suits by what is known of it alone."""
    format_L: list[int | None]
    """For each layer the format that all its units will have because all tokens suit, or none
    does; None where units must vote."""


class Predictor:
    """The thresholds as arrays."""

    def __init__(self, thresholds: Thresholds) -> None:
        layers = thresholds.layers
        self.thresholds = thresholds
        self.whitelisted = tuple(layer.whitelist for layer in layers)
        self._allowed_LC = np.array(
            [[name not in layer.full_classes for name in CLASSES] for layer in layers], bool
        ).reshape(len(layers), len(CLASSES))
        self.uses_margin = tuple(layer.min_margin > -math.inf for layer in layers)
        self.uses_range = tuple(layer.max_range < math.inf for layer in layers)
        self._first_L1 = np.array([[layer.min_position] for layer in layers], np.int64)
        self._uses_class = not self._allowed_LC.all()
        self._asks_later = [a or b for a, b in zip(self.uses_margin, self.uses_range, strict=True)]

    def ahead(self, classes_T: UInt8, positions_T: npt.NDArray[np.int64]) -> Ahead:
        """Predict all layers in one go from what is known of the tokens before the step."""
        suits_LT: Bool = positions_T >= self._first_L1
        if self._uses_class:
            suits_LT &= self._allowed_LC[:, classes_T]
        num_suit_L = np.add.reduce(suits_LT, axis=1, dtype=np.int64).tolist()
        format_L = [
            None if later else _of_all(num_suit, len(positions_T))
            for num_suit, later in zip(num_suit_L, self._asks_later, strict=True)
        ]
        return Ahead(suits_LT, format_L)

    def known(self, layer: int, classes_T: UInt8, positions_T: npt.NDArray[np.int64]) -> Bool:
        """Return (T,) what `ahead` says of one layer."""
        suits_T: Bool = positions_T >= self._first_L1[layer]
        if self._uses_class:
            suits_T &= self._allowed_LC[layer, classes_T]
        return suits_T

    def predict(
        self, layer: int, known_T: Bool, margins_T: Float | None, ranges_T: Float | None
    ) -> Bool:
        """Return (T,) whether a token suits `layer`, given margin and range of the layer before.

        NaN suits no limit. A feature that the layer has no limit on may be None.
        """
        limits = self.thresholds.layers[layer]
        if self.uses_margin[layer]:
            assert margins_T is not None, "the limit needs the margins"
            known_T = known_T & (margins_T >= limits.min_margin)
        if self.uses_range[layer]:
            assert ranges_T is not None, "the limit needs the ranges"
            known_T = known_T & (ranges_T <= limits.max_range)
        return known_T


def _of_all(num_suit: int, num_tokens: int) -> int | None:
    if num_suit == num_tokens:
        return INT8
    return None if num_suit else NATIVE
