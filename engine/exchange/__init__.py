"""Bringing rows to the experts that run them, and home again."""
