"""Level 2: which number format a token's experts run in.

A *unit* of rows goes through INT8 when most of its tokens suit it, so that formats do not change
from row to row. Whether a token suits is predicted from light features known before the layer;
what came out is checked, and a unit predicted wrong is run again alone. The gate never leaves fp32.

    precision.json -> Predictor -> vote by unit -> experts -> check -> (run the failed units again)

`engine.model.moe` asks a `PrecisionStep` for each layer; thresholds are made by
`workbench precision calibrate`.
"""

from engine.routing.precision.features import CLASSES, classes_of
from engine.routing.precision.router import PrecisionRouter
from engine.routing.precision.step import PrecisionStep
from engine.routing.precision.thresholds import (
    FILE,
    KINDS,
    MODES,
    Check,
    LayerThresholds,
    Precision,
    Thresholds,
)
from engine.routing.precision.units import REASONS, Units, read_code

__all__ = [
    "CLASSES",
    "FILE",
    "KINDS",
    "MODES",
    "REASONS",
    "Check",
    "LayerThresholds",
    "Precision",
    "PrecisionRouter",
    "PrecisionStep",
    "Thresholds",
    "Units",
    "classes_of",
    "read_code",
]
