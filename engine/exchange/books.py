"""What one rank sent in a step and when: sums, and every flight where somebody wants to know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.events import Flights, Int64


@dataclass(slots=True)
class Exchanged:
    """What one rank sent in one step, summed over layers; the receiving side is its peers'."""

    rows_G: Int64
    """(G,) rows sent to each device, the own one included."""
    bytes_G: Int64
    """(G,) bytes sent to each other device: rows out, results back, counts."""
    messages_G: Int64
    """(G,) messages sent to each other device."""
    wait_s: float = 0.0
    """Until the slowest rank had said how many rows it sends."""
    transfer_s: float = 0.0
    """Until rows and results had come, once everybody was there."""

    @classmethod
    def none(cls, num_devices: int) -> Exchanged:
        """Start a step's books."""
        rows_G, bytes_G, messages_G = (np.zeros(num_devices, dtype=np.int64) for _ in range(3))
        return cls(rows_G, bytes_G, messages_G)


@dataclass(slots=True)
class FlightLog:
    """One thing under way, as `engine.events.Flights` tells it."""

    layer: int
    part: int
    results: bool
    rows_G: Int64
    sent_ns: int
    arrived_ns: int = 0


def flights(logs: Sequence[FlightLog], num_devices: int, origin_ns: int) -> Flights:
    """Put what was under way into columns, with times since `origin_ns`."""
    times = np.array([(log.sent_ns, log.arrived_ns) for log in logs], np.int64).reshape(-1, 2)
    sent_ms, arrived_ms = ((times - origin_ns) / 1e6).astype(np.float32).T
    return Flights(
        np.array([log.layer for log in logs], np.int16),
        np.array([log.part for log in logs], np.int16),
        np.array([log.results for log in logs], np.uint8),
        sent_ms,
        arrived_ms,
        np.array([log.rows_G for log in logs], np.int32).reshape(-1, num_devices),
    )
