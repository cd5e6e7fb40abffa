"""Record what an engine did, keep it in a file, and play it back.

    recorder = Recorder()
    engine = Engine(EngineConfig(model=folder), sink=recorder)
    ...
    save(recorder.trace(), "run.moetrace")
    for event in replay(load("run.moetrace")):
        sink.emit(event)

What is played back cannot be told from what a live sink saw.
"""

from __future__ import annotations

from workbench.trace.recorder import Recorder
from workbench.trace.replay import replay
from workbench.trace.store import load, save
from workbench.trace.trace import Dropped, Trace

__all__ = ["Dropped", "Recorder", "Trace", "load", "replay", "save"]
