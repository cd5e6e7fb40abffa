"""The live dashboard: a process of its own that follows an engine's telemetry stream."""
