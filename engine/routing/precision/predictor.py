"""Predict which tokens suit INT8 in a layer, before the layer runs.

What depends on the token alone (whitelist, position, class) is looked up once a step for all layers
together; the layer before adds its gate margin and activation range. In the first MoE layer nothing
came before, so the look-up alone decides.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from engine.routing.precision.features import CLASSES, Float, UInt8
from engine.routing.precision.thresholds import Thresholds

Bool = npt.NDArray[np.bool_]


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

    def known(self, classes_T: UInt8, positions_T: npt.NDArray[np.int64]) -> Bool:
        """Return (L, T) whether a token suits by what is known of it before the step."""
        suits_LT: Bool = positions_T >= self._first_L1
        if self._uses_class:
            suits_LT &= self._allowed_LC[:, classes_T]
        return suits_LT

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
