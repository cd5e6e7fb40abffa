"""The frame stream: how other processes watch a running engine without slowing it.

`Telemetry` is a sink in the engine's process; `TelemetryClient` is what a dashboard holds. Between
them goes a loopback socket with a key. Imports only the engine's events, numpy and the standard
library, so that a dashboard starts without torch.
"""

from __future__ import annotations

from engine.runtime.telemetry.aggregate import Aggregator
from engine.runtime.telemetry.client import TelemetryClient
from engine.runtime.telemetry.server import Telemetry
from engine.runtime.telemetry.wire import Message

__all__ = ["Aggregator", "Message", "Telemetry", "TelemetryClient"]
