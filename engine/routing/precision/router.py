"""What lives longer than a step: the vocabulary's classes, the thresholds in force, the sampling.

One engine in one process has one; `engine.cluster.rank` asks it for each step's `PrecisionStep`.
"""

from __future__ import annotations

from engine.events import Int64, UInt8
from engine.faults import Faults
from engine.routing.precision.predictor import Predictor
from engine.routing.precision.step import PrecisionStep
from engine.routing.precision.thresholds import Precision, Thresholds


class PrecisionRouter:
    """Makes a step's `PrecisionStep`."""

    def __init__(self, classes_V: UInt8, faults: Faults) -> None:
        """Keep the class of each token of the vocabulary, see `features.classes_of`."""
        self.faults = faults
        self.ahead = True
        """Whether a step's formats are predicted for all layers in one go at its start, as far as
        they can be, or layer by layer; the formats are the same, the time it takes is not."""
        self._classes_V = classes_V
        self._predictor: Predictor | None = None
        self._due = 0
        """INT8 units since the last sample."""

    def begin(
        self, precision: Precision, request_ids_T: Int64, positions_T: Int64, token_ids_T: Int64
    ) -> PrecisionStep | None:
        """Return what decides one step's formats; None when all rows run in the engine's own."""
        if precision.mode == "model":
            return None
        classes_T = self._classes_V[token_ids_T]
        return PrecisionStep(self, precision, request_ids_T, positions_T, classes_T)

    def predictor(self, thresholds: Thresholds) -> Predictor:
        """Return the predictor of these thresholds, made once for them."""
        if self._predictor is None or self._predictor.thresholds is not thresholds:
            self._predictor = Predictor(thresholds)
        return self._predictor

    def pick(self, num_units: int, every: int) -> range:
        """Return which of a layer's INT8 units, by number, have a row sampled: one in `every`.

        The count goes on from layer to layer and step to step, so that few units a step are sampled
        as often as many.
        """
        if not every:
            return range(0)
        first, self._due = every - 1 - self._due, (self._due + num_units) % every
        return range(first, num_units, every)
