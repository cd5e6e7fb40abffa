"""`workbench lab`: private, on a free port, quiet, and nothing of it outlives it."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from engine.errors import MachineError
from workbench import lab as lab_module
from workbench import paths
from workbench.cli import main
from workbench.lesson_copies import originals

GONE_S = 10.0


class Lab:
    """A `workbench lab` of our own, and the processes it has started."""

    def __init__(self, port: int, lessons: Path) -> None:
        command = [sys.executable, "-m", "workbench", "lab", "--json", f"--port={port}"]
        command.append(f"--lessons={lessons}")
        self.process = subprocess.Popen(
            command, cwd=paths.root(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        self.report = json.loads(line)
        self.url = self.report["url"]
        parts = urlsplit(self.url)
        self.base, self.port = f"http://{parts.netloc}", parts.port
        self.token = parts.query.removeprefix("token=")

    def ask(self, path: str, *, token: str | None = None, body: bytes | None = None) -> bytes:
        headers = {"Authorization": f"token {self.token if token is None else token}"}
        request = urllib.request.Request(f"{self.base}{path}", body, headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read()

    def family(self) -> list[psutil.Process]:
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int], Lab]]:
    labs: list[Lab] = []

    def start(port: int) -> Lab:
        labs.append(Lab(port, tmp_path / "lessons"))
        return labs[-1]

    yield start
    for lab in labs:
        lab.process.kill()
        lab.process.communicate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def assert_gone(family: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(family, timeout=GONE_S)
    left = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert len(family) >= 3 and not left, left


def test_it_opens_the_first_lesson_behind_a_token_and_ctrl_c_ends_all(start, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        lab = start(port)
    assert lab.port != port, "the next free port is taken"
    assert urlsplit(lab.url).path == "/lab/tree/00_start_here.ipynb"
    assert len(lab.token) >= 32

    # 1. Nobody without the token, and nobody from another machine.
    for token in ("", "wrong"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            lab.ask("/api/contents", token=token)
        assert refused.value.code == 403
        refused.value.close()
    kinds = psutil.Process(lab.family()[1].pid).net_connections("tcp")
    assert {c.laddr.ip for c in kinds if c.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
    for process in lab.family():
        assert lab.token not in " ".join(process.cmdline())

    # 2. The page is JupyterLab, with the copies as its root; nothing asks about news.
    page = lab.ask("/lab").decode()
    config = json.loads(page.split('id="jupyter-config-data"')[1].split(">")[1].split("<")[0])
    assert config["news"] == {"disabled": True}
    names = {entry["name"] for entry in json.loads(lab.ask("/api/contents"))["content"]}
    assert names == {path.name for path in originals()}
    assert lab.report["lessons"] == str(tmp_path / "lessons")

    # 3. A kernel runs with this interpreter; Ctrl-C ends it too.
    lab.ask("/api/kernels", body=b"{}")
    family = lab.family()
    kernels = [p for p in family if any("ipykernel" in word for word in p.cmdline())]
    assert [kernel.cmdline()[0] for kernel in kernels] == [sys.executable]
    os.kill(lab.process.pid, signal.SIGINT)
    _, err = lab.process.communicate(timeout=30)
    assert lab.process.returncode == 0
    assert err.endswith("SIGINT: JupyterLab has ended\n")
    assert_gone(family)


def test_a_killed_parent_leaves_neither_server_nor_kernel(start):
    lab = start(free_port())
    lab.ask("/api/kernels", body=b"{}")
    family = lab.family()
    lab.process.kill()
    assert_gone(family)


def test_the_files_with_the_token_are_for_this_user_alone_and_ask_no_news(tmp_path):
    folders = lab_module._folders(tmp_path / "scratch", tmp_path / "kept")
    assert all(stat.S_IMODE(folder.stat().st_mode) == 0o700 for folder in folders.values())
    config = folders["JUPYTER_CONFIG_DIR"]
    more = {"LabApp": {"expose_app_in_browser": True}}
    lab_module._write_config(config, tmp_path, "a.ipynb", 8888, more)
    (file,) = config.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    written = json.loads(file.read_text())
    assert written["ServerApp"]["ip"] == "127.0.0.1" and written["IdentityProvider"]["token"]
    assert written["LabApp"]["expose_app_in_browser"] and written["LabApp"]["news_url"] is None
    setting = next((tmp_path / "kept" / "settings").rglob("notification.jupyterlab-settings"))
    assert json.loads(setting.read_text())["fetchNews"] == "false"
    setting.write_text("{}")
    lab_module._folders(tmp_path / "scratch", tmp_path / "kept")
    assert setting.read_text() == "{}", "what a person has set stays"


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--port", "0"], 2, "port (0) must be a whole number of at least 1."),
        (["--port", "65536"], 2, "port (65536) must lie between 1 and 65535."),
        (["--seconds", "0"], 2, "seconds (0) must be above 0."),
    ],
)
def test_a_wrong_option_is_one_sentence(capfd, words, code, sentence):
    assert main(["lab", *words]) == code
    assert capfd.readouterr() == ("", f"workbench: {sentence}\n")


def test_a_missing_package_or_notebook_is_one_sentence(capfd, monkeypatch, tmp_path):
    with (
        pytest.raises(MachineError, match="no.ipynb is not in"),
        lab_module.lab_process(tmp_path, notebook="no.ipynb"),
    ):
        pass
    monkeypatch.setattr(lab_module, "_NEEDED", ("no_such_package",))
    assert main(["lab"]) == 1
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("workbench: the lessons need no_such_package; install")


def test_a_server_that_cannot_start_is_told_in_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(
        lab_module,
        "python_command",
        lambda *words: [sys.executable, "-c", "import sys; sys.exit('no luck today')"],
    )
    with pytest.raises(MachineError, match="the JupyterLab has ended .exit code 1.: no luck"):
        lab_module.lab(lessons=tmp_path, port=free_port())


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "kept").write_text("a file, not a folder")
    with pytest.raises(MachineError, match="kept.* cannot be written"):
        lab_module._folders(tmp_path / "scratch", Path(tmp_path / "kept"))
