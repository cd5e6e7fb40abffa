"""Who may drive a presented demo, and what every frame says of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from engine.errors import RequestError
from engine.runtime.telemetry import Message, Telemetry, TelemetryClient
from workbench.demos.present import Presentation
from workbench.desk import Desk

ROOT = Path(__file__).resolve().parents[2]
KEY = "the-presenters-key"


@pytest.fixture
def shown(player):
    """Present the shared player over a real telemetry stream, served on this thread."""
    desk = Desk()
    with closing(desk), closing(Telemetry(on_control=desk.take)) as telemetry:
        presentation = Presentation(player.playlist, telemetry, KEY)
        presentation.serve(desk)
        presentation.player = player
        player.go(0)
        presentation.tell()
        yield presentation, telemetry, desk


class Viewer:
    """Somebody who watches the stream; `ask` waits while the desk is served."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.demo: dict = {}
        self.client = TelemetryClient(telemetry.address, telemetry.key, on_frame=self._take)
        self.client.start()

    def _take(self, frame: Message) -> None:
        self.demo = frame.meta["facts"].get("demo", {})

    def wait_for(self, at: int) -> None:
        end = time.monotonic() + 20
        while self.demo.get("at") != at:
            assert time.monotonic() < end, f"still at {self.demo.get('at')}"
            time.sleep(0.02)

    def ask(self, desk: Desk, action: str = "demo", **detail: object) -> object:
        answers: list[object] = []

        def run() -> None:
            try:
                answers.append(self.client.control(action, timeout_s=20, **detail))
            except RequestError as refusal:
                answers.append(refusal)

        asking = threading.Thread(target=run)
        asking.start()
        while asking.is_alive():
            desk.serve(0.02)
        return answers[0]


def test_the_presenter_drives_and_all_viewers_also_late_ones_end_on_the_same_step(shown):
    _, telemetry, desk = shown
    viewers = [Viewer(telemetry) for _ in range(5)]
    for viewer in viewers:
        viewer.wait_for(0)
    for to in (3, 1, 4):
        assert viewers[0].ask(desk, key=KEY, to=to) == {"at": to}
    late = Viewer(telemetry)
    for viewer in [*viewers, late]:
        viewer.wait_for(4)
        viewer.client.close()
    assert {viewer.demo["visit"] for viewer in [*viewers, late]} == {late.demo["visit"]}


@pytest.mark.parametrize("key", ["", "wrong", None, 7, KEY + "x"])
def test_without_the_key_nothing_moves(shown, key):
    presentation, telemetry, desk = shown
    viewer = Viewer(telemetry)
    viewer.wait_for(0)
    answer = viewer.ask(desk, key=key, to=5)
    viewer.client.close()
    assert isinstance(answer, RequestError) and "only the presenter" in str(answer)
    assert presentation.player.at == 0 and presentation.player.engine.control.policy.is_empty


@pytest.mark.parametrize("to", [True, "1", None, 1.0, -1, 99])
def test_a_place_that_is_no_step_is_refused(shown, to):
    presentation, _, _ = shown
    with pytest.raises(RequestError):
        presentation.drive({"key": KEY, "to": to})
    assert presentation.player.at == 0


def written(presentation: Presentation) -> None:
    """Go to the step with the stepper and wait until its text is written."""
    player = presentation.player
    player.go(next(n for n, step in enumerate(player.playlist.steps) if "token" in step.view))
    while player.exhibit is None:
        player.run()
    presentation.tell()


def test_the_presenter_leads_the_stepper_and_the_next_step_begins_anew(shown):
    presentation, telemetry, desk = shown
    written(presentation)
    viewer = Viewer(telemetry)
    viewer.wait_for(1)
    focus = {"token": 2, "layer": 1, "stage": "select"}
    assert viewer.ask(desk, action="demo_focus", key=KEY, **focus) == focus
    late = Viewer(telemetry)
    late.wait_for(1)
    while late.demo["focus"] is None or viewer.demo["focus"] is None:
        time.sleep(0.02)
    assert late.demo["focus"] == viewer.demo["focus"] == focus
    viewer.ask(desk, key=KEY, to=2)
    viewer.wait_for(2)
    assert viewer.demo["focus"] is None
    viewer.client.close()
    late.client.close()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"key": "guess"}, "only the presenter"),
        ({"token": 9999}, "token"),
        ({"token": True}, "token"),
        ({"layer": -1}, "layer"),
        ({"stage": "gates"}, "stage"),
    ],
)
def test_a_place_that_is_not_there_is_refused(shown, wrong, words):
    presentation, _, _ = shown
    written(presentation)
    right = {"key": KEY, "token": 0, "layer": 0, "stage": "gate"}
    with pytest.raises(RequestError, match=words):
        presentation.lead({**right, **wrong})
    assert presentation.lead(right) == {"token": 0, "layer": 0, "stage": "gate"}


def test_before_the_text_is_written_there_is_nothing_to_point_at(shown):
    presentation, _, _ = shown
    with pytest.raises(RequestError, match="nothing to step through"):
        presentation.lead({"key": KEY, "token": 0, "layer": 0, "stage": "gate"})


def test_the_key_itself_is_in_no_frame(shown):
    _, telemetry, _ = shown
    while telemetry.latest is None:
        time.sleep(0.02)
    assert KEY not in json.dumps(telemetry.latest.meta)


def test_viewers_may_not_change_the_traffic(shown):
    _, _, desk = shown
    with pytest.raises(RequestError, match="unknown action 'traffic'"):
        desk.take("traffic", {"paused": True})


@pytest.mark.timeout(240)
def test_ctrl_c_while_presenting_leaves_no_process():
    words = ["demo", "present", "routing-in-five-minutes", "--json", "--port=5970", "--threads=1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "workbench", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    links = json.loads(process.stdout.readline())
    assert links["presenter_url"].startswith(links["viewer_url"] + "?key=")
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    assert links["dashboard_pid"] in [member.pid for member in family]
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 0 and "Traceback" not in said
    assert not psutil.wait_procs(family, timeout=5)[1]
