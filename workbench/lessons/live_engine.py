"""A live engine and its dashboard from a notebook; asked for twice, it is the same one.

The engine runs on a thread of the notebook's own process, on mixed traffic; the dashboard is a
process of its own that ends with the notebook's, however that ends.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, closing

from engine import Engine, EngineConfig
from engine.events import Tee
from engine.runtime.telemetry import Telemetry
from workbench import paths
from workbench.actions import serve_actions
from workbench.dashboard import READY_S, dashboard_process, require_packages
from workbench.desk import Desk
from workbench.traffic import Traffic, corpus_prompts
from workbench.window import Window

DEFAULT_PORT = 5006
_one = threading.Lock()
_held: list[Live] = []


class Live:
    """What `live` has started; `url` is the dashboard's address."""

    def __init__(self, model: str, running: int, devices: int, port: int) -> None:
        require_packages()
        with ExitStack() as stack:
            self._desk = stack.enter_context(closing(Desk()))
            telemetry = stack.enter_context(closing(Telemetry(on_control=self._desk.take)))
            self._child = stack.enter_context(dashboard_process(telemetry, port))
            window = Window()
            config = EngineConfig(
                model=paths.model_folder(model), num_devices=devices, num_threads=1
            )
            self.engine = Engine(config, sink=Tee((telemetry, window)))
            stack.callback(self.engine.close)
            telemetry.show_prompts(self.engine.tokenizer.decode)
            self._traffic = Traffic(corpus_prompts(), running)
            serve_actions(self._desk, self.engine, self._traffic, telemetry, window)
            self.url = str(self._child.report(READY_S)["url"])
            self._kept = stack.pop_all()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether both the engine's loop and the dashboard run."""
        return self._thread.is_alive() and self._child.alive()

    @property
    def dashboard_pid(self) -> int:
        """The dashboard's process id."""
        return self._child.pid

    def close(self) -> None:
        """End engine and dashboard; closing twice is fine."""
        self._stopped.set()
        self._thread.join()
        self._kept.close()

    def _run(self) -> None:
        busy = True
        while not self._stopped.is_set():
            self._desk.serve(0.0 if busy else 0.05)
            busy = self._traffic.step(self.engine)

    def _repr_html_(self) -> str:
        return f'The dashboard is at <a href="{self.url}" target="_blank">{self.url}</a>.'


def live(
    *,
    model: str = paths.DEFAULT_MODEL,
    running: int = 4,
    devices: int = 4,
    port: int = DEFAULT_PORT,
) -> Live:
    """Return the live engine of this process, started now unless one runs already.

    Args:
        model: folder, or the name of a bundled model.
        running: requests kept going.
        devices: logical devices the experts are spread over.
        port: first port to try for the dashboard; the next free one is taken.

    Raises:
        MachineError: the extra `ui` is missing, or the dashboard did not start.
        ConfigError: a number that is not allowed.
        CheckpointError: the model folder is missing or damaged.
    """
    with _one:
        if _held and _held[0].alive:
            return _held[0]
        while _held:
            _held.pop().close()
        _held.append(Live(model, running, devices, port))
        return _held[0]
