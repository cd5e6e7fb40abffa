"""Level 2 measured: which tokens suit INT8, which layers do not, and what it all brings.

`calibrate` finds the thresholds that `engine.routing.precision` chooses by, `report` says what they
are worth on text held out. Both run the engine itself and look at its layers from outside.
"""
