"""A JupyterLab of its own for tests: no token, no news, no settings of anybody, on a free port."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import psutil
from playwright.sync_api import Page

ROOT = Path(__file__).resolve().parents[2]
QUIET = {"fetchNews": "false", "checkForUpdates": False}
_CURRENT = "window.jupyterapp.shell.currentWidget"
_ITS_OWN = re.compile(
    # a busy machine
    r"Plugin .* (took .*ms|is taking too long) to activate"
    # a kernel that was ended while JupyterLab still asked it things
    r"|History was unable to be retrieved"
    r"|Could not restore the debugger state: Canceled future for debug_request"
)
"""What JupyterLab itself says on the console, and neither the lessons nor the widgets cause."""


@contextmanager
def jupyter_lab(folder: Path) -> Iterator[str]:
    """Run JupyterLab on `folder`; yield its address; leave no process."""
    private = folder / ".private"
    settings = private / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(QUIET))
    names = ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")
    environment = {
        **os.environ,
        **{f"JUPYTER_{name}": str(private / name.lower()) for name in names},
        "JUPYTERLAB_SETTINGS_DIR": str(private / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(private / "workspaces"),
        "IPYTHONDIR": str(private / "ipython"),
        "PYTHONPATH": str(ROOT),
        "JUPYTER_PLATFORM_DIRS": "1",
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root",
        f"--ServerApp.port={port}", "--ServerApp.port_retries=0", "--ServerApp.ip=127.0.0.1",
        "--IdentityProvider.token=", "--ServerApp.password=", f"--ServerApp.root_dir={folder}",
        "--LabApp.expose_app_in_browser=True", "--LabApp.extension_manager=readonly",
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.handlers.announcements.NeverCheckForUpdate",
    ]  # fmt: skip
    with (folder / "lab.log").open("w") as log:
        server = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}/"
    try:
        _wait_until_up(server, url, folder / "lab.log")
        yield url
    finally:
        family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        server.terminate()
        _, left = psutil.wait_procs(family, timeout=10)
        for process in left:
            process.kill()
        server.wait()


def write_notebook(path: Path, cells: Sequence[str]) -> None:
    """Write a notebook; a cell that begins with `#` and a blank is text."""
    notebook = nbformat.v4.new_notebook()
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    notebook.cells = [
        nbformat.v4.new_markdown_cell(cell)
        if cell.startswith("# ")
        else nbformat.v4.new_code_cell(cell)
        for cell in cells
    ]
    nbformat.write(notebook, path)


def _wait_until_up(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}api", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"JupyterLab did not start: {log.read_text()[-2000:]}")


def without_its_own(complaints: Sequence[str]) -> list[str]:
    """Return what was complained about, but for what JupyterLab says for reasons of its own."""
    return [line for line in complaints if not _ITS_OWN.search(line)]


def wait_for_kernel(page: Page, name: str) -> None:
    """Wait until a notebook is open and its kernel is ready.

    Who ends a kernel earlier breaks off a connection that is being made, which Chromium warns of.
    """
    page.wait_for_function("() => window.jupyterapp", timeout=90_000)
    page.wait_for_function(
        f"""name => {{ const w = {_CURRENT};
          return w?.context?.path === name && w.context.isReady && w.sessionContext.isReady
            && w.sessionContext.session?.kernel?.status === "idle"; }}""",
        arg=name,
        timeout=90_000,
    )


class Notebook:
    """An open notebook whose kernel is ready."""

    def __init__(self, page: Page, url: str, name: str) -> None:
        self.page = page
        page.goto(f"{url}lab/tree/{name}?reset")
        wait_for_kernel(page, name)

    def run_all(self) -> None:
        self.command("notebook:run-all-cells")
        self.page.wait_for_function(
            f"() => {_CURRENT}.sessionContext.session.kernel.status === 'idle'", timeout=60_000
        )

    def command(self, name: str, **arguments: Any) -> None:
        self.page.evaluate(
            "([name, given]) => window.jupyterapp.commands.execute(name, given).then(() => null)",
            [name, arguments],
        )

    def python(self, code: str) -> str:
        """Run code in the kernel and return what it printed or raised."""
        return self.page.evaluate(
            f"""async code => {{
              const kernel = {_CURRENT}.sessionContext.session.kernel;
              const future = kernel.requestExecute({{ code, store_history: false }});
              let out = "";
              future.onIOPub = ({{ content: {{ text, ename, evalue }} }}) => {{
                out += text ?? (ename ? `${{ename}}: ${{evalue}}` : "");
              }};
              await future.done;
              return out.trim();
            }}""",
            code,
        )

    @property
    def active_cell(self) -> int:
        return self.page.evaluate(f"() => {_CURRENT}.content.activeCellIndex")

    @property
    def num_cells(self) -> int:
        return self.page.evaluate(f"() => {_CURRENT}.context.model.cells.length")

    def errors(self) -> list[str]:
        """Return the errors that cells put out."""
        return self.page.evaluate(
            f"""() => {{ const cells = {_CURRENT}.context.model.cells, found = [];
              for (let n = 0; n < cells.length; n++) {{
                for (const output of cells.get(n).outputs?.toJSON() ?? []) {{
                  if (output.ename) found.push(`${{output.ename}}: ${{output.evalue}}`); }} }}
              return found; }}"""
        )

    def theme(self, name: str) -> None:
        """Change the theme, and wait until JupyterLab's splash of doing so is gone.

        Each change takes the one splash away 200 ms after it is done, without looking whether it is
        still there: two changes within that time end in an error about `removeChild`, on a page
        without any widget too.
        """
        self.command("apputils:change-theme", theme=f"JupyterLab {name}")
        self.page.locator("#jupyterlab-splash").wait_for(state="detached")

    def close(self) -> None:
        """Save without outputs, so that nothing asks for dead widgets, and end the kernel."""
        self.command("notebook:clear-all-cell-outputs")
        self.page.evaluate(f"() => {_CURRENT}.context.save().then(() => null)")
        self.page.evaluate(f"() => {_CURRENT}.sessionContext.shutdown().then(() => null)")
