"""The ladder: what each step from request-level to optimised token-level routing is worth.

`measured` runs the bundled model on real ranks; `modelled` computes the same rungs for a machine on
paper. Both return

    {"topology", "shape", "tokens", "rows": [...]}

with one row a rung (`rungs.RUNGS`, then the dense control), see `rungs.row` for the columns.
"""
