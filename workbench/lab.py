"""JupyterLab on the lessons: private, quiet, and gone when we are.

A person works on copies of their own (`workbench.lesson_copies`). The server is a child by command
and runs JupyterLab inside `python -m workbench.lab`, which ends with its parent. It keeps to
loopback and asks for Jupyter's token. Theme and layout are kept in `.lab/` beside the notebooks, so
that a person's own Jupyter settings neither disturb the lessons nor are touched by them. No news,
no look for updates, no installing of extensions.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from engine.config import at_least
from engine.errors import ConfigError, MachineError
from workbench import paths
from workbench.lesson_copies import own_copies
from workbench.lifecycle import (
    Child,
    Ended,
    end_with_parent,
    ending_signals,
    own_identity,
    python_command,
)

DEFAULT_PORT = 8888
START_NOTEBOOK = "00_start_here.ipynb"
READY_S = 90.0
"""How long JupyterLab may take to answer on a busy machine."""
_LOOK_EVERY_S = 0.2
_NEEDED = ("jupyterlab", "ipykernel", "anywidget", "platformdirs", "plotly", "psutil")
_QUIET = {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True}


def lab(
    *,
    lessons: Path | None = None,
    fresh: bool = False,
    port: int = DEFAULT_PORT,
    seconds: float | None = None,
    as_json: bool = False,
) -> int:
    """Run JupyterLab on a person's own copies until asked to end; return the exit code.

    Args:
        lessons: folder of the copies; None takes a place of the user's own.
        fresh: set changed copies aside and begin anew.
        port: first port to try; the next free one is taken.
        seconds: end by itself after so long.
        as_json: print the address as one JSON line.

    Raises:
        ConfigError: an option has a value that is not allowed.
        MachineError: a package is missing, the copies cannot be made, or JupyterLab did not start
            or ended.
    """
    if seconds is not None and not seconds > 0:
        raise ConfigError(f"seconds ({seconds:g}) must be above 0.")
    check_packages(port)
    end = time.monotonic() + seconds if seconds is not None else float("inf")
    copies = own_copies(lessons, fresh=fresh)
    for sentence in copies.said:
        print(sentence, file=sys.stderr, flush=True)
    try:
        with ending_signals(), running_lab(copies.folder, port=port) as (child, url):
            report = {
                "url": url,
                "lessons": str(copies.folder),
                "pid": os.getpid(),
                "lab_pid": child.pid,
            }
            text = (
                f"\n  JupyterLab  {url}\n  Lessons     {copies.place} (your own copies)\n\n"
                "  Ctrl-C ends it.\n"
            )
            print(json.dumps(report) if as_json else text, flush=True)
            while time.monotonic() < end:
                time.sleep(_LOOK_EVERY_S)
                if not child.alive():
                    raise MachineError(child.epitaph())
    except Ended as ended:
        with contextlib.suppress(OSError):
            print(f"{ended.name}: JupyterLab has ended", file=sys.stderr, flush=True)
    return 0


@contextlib.contextmanager
def running_lab(
    folder: Path,
    *,
    notebook: str = START_NOTEBOOK,
    port: int = DEFAULT_PORT,
    settings: Path | None = None,
    more: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[tuple[Child, str]]:
    """Start JupyterLab; yield its process and its address with the token; end it after the block.

    Takes the arguments of `lab_process` and raises what that does.

    Raises:
        MachineError: JupyterLab did not start.
    """
    with lab_process(folder, notebook=notebook, port=port, settings=settings, more=more) as child:
        yield child, str(child.report(READY_S)["url"])


@contextlib.contextmanager
def lab_process(
    folder: Path,
    *,
    notebook: str = START_NOTEBOOK,
    port: int = DEFAULT_PORT,
    settings: Path | None = None,
    more: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[Child]:
    """Start JupyterLab and yield its process at once; end it after the block.

    Its report is `{"url"}`, with the token, once it listens.

    Args:
        folder: what JupyterLab may open and write in.
        notebook: what the address opens, relative to it.
        port: first port to try; the next free one is taken.
        settings: folder for theme and layout; None takes `.lab` in `folder`.
        more: further Jupyter settings by class and name, over ours.

    Raises:
        ConfigError: the port is none.
        MachineError: a package or the notebook is missing.
    """
    check_packages(port)
    if not (folder / notebook).is_file():
        raise MachineError(f"{notebook} is not in {folder}; name a notebook that is there.")
    with tempfile.TemporaryDirectory(
        prefix="workbench-lab-", ignore_cleanup_errors=True
    ) as scratch:
        folders = _folders(Path(scratch), settings or folder / ".lab")
        _write_config(folders["JUPYTER_CONFIG_DIR"], folder, notebook, port, more or {})
        command = python_command("workbench.lab", f"--parent={own_identity()}")
        first_line = json.dumps({name: str(place) for name, place in folders.items()})
        child = Child("JupyterLab", command, first_line=first_line, folder=paths.root())
        try:
            yield child
        finally:
            child.stop()


def check_packages(port: int) -> None:
    """Refuse before anything is made.

    Raises:
        ConfigError: the port is none.
        MachineError: a package is missing.
    """
    at_least("port", port, 1)
    if port > 65535:
        raise ConfigError(f"port ({port}) must lie between 1 and 65535.")
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise MachineError(
            f"the lessons need {', '.join(missing)}; install the extra with "
            "`pip install -e '.[ui]'`."
        )


def _folders(scratch: Path, kept: Path) -> dict[str, Path]:
    """Return the folders Jupyter asks the environment for: some end with it, some are kept."""
    folders = {
        "JUPYTER_CONFIG_DIR": scratch / "config",
        "JUPYTER_DATA_DIR": scratch / "data",
        "JUPYTER_RUNTIME_DIR": scratch / "runtime",
        "JUPYTERLAB_SETTINGS_DIR": kept / "settings",
        "JUPYTERLAB_WORKSPACES_DIR": kept / "workspaces",
        "IPYTHONDIR": kept / "ipython",
    }
    try:
        for folder in folders.values():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _silence(folders["JUPYTERLAB_SETTINGS_DIR"])
    except OSError as wrong:
        raise MachineError(
            f"{wrong.filename} cannot be written: {wrong.strerror or wrong}; JupyterLab "
            "keeps its settings there; name a folder that can be with --lessons DIR."
        ) from None
    return folders


def _silence(settings: Path) -> None:
    """Write the setting that keeps JupyterLab from asking whether it may fetch news."""
    file = settings / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(_QUIET), encoding="utf-8")


def _write_config(
    config_folder: Path,
    folder: Path,
    notebook: str,
    port: int,
    more: Mapping[str, Mapping[str, Any]],
) -> None:
    """Write the server's settings into a folder only this user can read: they hold the token."""
    config: dict[str, dict[str, Any]] = {
        "ServerApp": {
            "ip": "127.0.0.1",
            "port": port,
            "port_retries": 100,
            "open_browser": False,
            "root_dir": str(folder),
            "allow_root": True,
        },
        "IdentityProvider": {"token": secrets.token_hex(24)},
        "LabApp": {
            "default_url": f"/lab/tree/{notebook}",
            "extension_manager": "readonly",
            "news_url": None,
            "check_for_updates_class": "jupyterlab.handlers.announcements.NeverCheckForUpdate",
        },
    }
    for name, values in more.items():
        config[name] = {**config.get(name, {}), **values}
    file = config_folder / "jupyter_server_config.json"
    file.touch(mode=0o600)
    file.write_text(json.dumps(config), encoding="utf-8")


# --- the child ------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    """Serve JupyterLab as the first line on standard input says, until the parent is gone."""
    parser = argparse.ArgumentParser(prog="python -m workbench.lab")
    parser.add_argument("--parent", required=True, help="PID:START_TIME of the parent")
    parent = parser.parse_args(argv).parent
    # Jupyter reads these when it is imported.
    os.environ.update(json.loads(sys.stdin.readline()))
    end_with_parent(parent, watch_stdin=False)
    threading.Thread(target=_end_on_eof, name="watch-stdin", daemon=True).start()
    server = import_module("jupyterlab.labapp").LabApp.initialize_server(argv=[])
    # The socket is bound by a callback queued before this one.
    server.io_loop.add_callback(_report, server)
    server.start()


def _report(server: Any) -> None:
    token = server.identity_provider.token
    url = f"http://127.0.0.1:{server.port}{server.default_url}?token={token}"
    print(json.dumps({"url": url}), flush=True)


def _end_on_eof() -> None:
    """Ask the server to end its kernels and itself once the parent closes our standard input."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
