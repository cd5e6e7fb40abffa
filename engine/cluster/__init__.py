"""Ranks: one share of the engine each, in this process or in one of its own."""
