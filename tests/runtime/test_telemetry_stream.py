"""Frames to viewers: acknowledged, newest first, many and slow viewers, coming back."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from engine.errors import RequestError
from engine.events import ControlEvent, TextEvent
from engine.runtime.telemetry import Message, Telemetry, TelemetryClient
from engine.runtime.telemetry import server as server_module
from engine.runtime.telemetry import viewer as viewer_module
from engine.runtime.telemetry.wire import (
    Kind,
    encode,
)
from tests.runtime.telemetry_examples import (
    KEY,
    LAYERS,
    added,
    following,
    next_frame,
    raw_viewer,
    start_event,
    step_event,
    wait_for,
)


def test_a_viewer_sees_what_the_engine_emits(telemetry):
    frames: list[Message] = []
    with following(telemetry, on_frame=frames.append) as client:
        wait_for(lambda: client.state == "live", "a live client")
        now = time.time()
        for event in (start_event(now), added(1, "en", now), step_event((1,), (0, 2), now)):
            telemetry.emit(event)
        wait_for(lambda: frames and frames[-1].meta["totals"]["rows"] == 1, "the row")
        assert frames[-1].meta["engine"]["model"] == "tiny"
        assert frames[-1].arrays["total"].tolist() == [[[1, 0, 1, 0, 0]] * LAYERS]
        assert frames[-1].meta["looking"]["viewers"] == 1
    wait_for(lambda: telemetry.num_viewers == 0, "the viewer to be forgotten")


def test_an_engine_without_viewers_still_knows_its_rates(telemetry):
    now = time.time()
    for event in (start_event(now), added(1, "en", now), step_event((1,), (0, 2), now)):
        telemetry.emit(event)
    wait_for(lambda: telemetry.latest and telemetry.latest.meta["totals"]["rows"] == 1, "the row")


def test_frames_wait_for_the_acknowledgement_and_the_newest_wins(monkeypatch):
    monkeypatch.setattr(viewer_module, "PATIENCE_S", 60.0)
    stream = Telemetry(key=KEY, max_hz=200.0)
    try:
        with raw_viewer(stream) as (connection, splitter):
            first = next_frame(connection, splitter)
            for _ in range(20):
                stream.emit(ControlEvent("tick", {}, 1, time.time()))
                seq = stream.latest.seq
                wait_for(lambda seq=seq: stream.latest.seq > seq, "the next frame to be built")
            connection.settimeout(0.2)
            with pytest.raises(TimeoutError):
                connection.recv(1 << 16)
            connection.settimeout(10)
            built = stream.latest.seq
            connection.sendall(encode(Message(Kind.ACK, seq=first.seq)))
            second = next_frame(connection, splitter)
            assert second.seq >= built > first.seq + 15, "the newest, not the next"
            connection.sendall(encode(Message(Kind.ACK, seq=second.seq)))
            third = next_frame(connection, splitter)
            assert third.meta["looking"]["frames_dropped"] >= 15
    finally:
        stream.close()


def test_a_viewer_that_never_acknowledges_still_gets_frames_now_and_then(telemetry):
    with raw_viewer(telemetry) as (connection, splitter):
        seqs = [next_frame(connection, splitter).seq for _ in range(3)]
    assert seqs == sorted(set(seqs))


def test_an_acknowledgement_of_the_future_is_not_believed(telemetry):
    with raw_viewer(telemetry) as (connection, splitter):
        connection.sendall(encode(Message(Kind.ACK, seq=2**60)))
        seqs = [next_frame(connection, splitter).seq for _ in range(2)]
        (viewer,) = telemetry._viewers
        assert viewer.drawn_seq <= viewer.sent_seq and seqs[1] > seqs[0]


def test_twenty_viewers_all_see_the_last_row(telemetry):
    counts = [0] * 20
    with contextlib.ExitStack() as stack:
        for n in range(20):

            def note(frame: Message, n: int = n) -> None:
                counts[n] = frame.meta["totals"]["rows"]

            stack.enter_context(following(telemetry, on_frame=note))
        wait_for(lambda: telemetry.num_viewers == 20, "twenty viewers")
        telemetry.emit(start_event(time.time()))
        for _ in range(300):
            telemetry.emit(step_event((1,), (0, 1), time.time()))
        wait_for(lambda: counts == [300] * 20, "the last row everywhere")


def test_more_viewers_than_allowed_are_turned_away(telemetry, monkeypatch):
    monkeypatch.setattr(server_module, "MAX_VIEWERS", 1)
    with following(telemetry) as first:
        wait_for(lambda: first.state == "live", "the first viewer")
        with following(telemetry) as second:
            wait_for(lambda: second.state == "refused", "the second to be refused")
            assert "viewers are connected already" in second.reason
        assert first.state == "live"


def test_a_viewer_that_reads_nothing_holds_up_neither_engine_nor_others(telemetry):
    """Ten thousand steps with a stuck viewer: every emit returns, the other viewer sees the end."""
    rows = [0]

    def note(frame: Message) -> None:
        rows[0] = frame.meta["totals"]["rows"]

    big = 200
    with raw_viewer(telemetry), following(telemetry, on_frame=note):
        telemetry.emit(start_event(time.time()))
        for n in range(big):
            telemetry.emit(added(n, f"d{n}", time.time()))
            telemetry.emit(TextEvent(n, "", "x" * 400, 1, False, time.time()))
        for n in range(10_000):
            telemetry.emit(step_event((n % big,), (0, 1), time.time()))
            if n % 1000 == 0:
                time.sleep(0.05)  # a step takes time; without it the bounded queue may drop
        wait_for(lambda: rows[0] == 10_000, "every row to be counted")
        held = [viewer._out for viewer in telemetry._viewers]
        assert len(held) == 2
    assert telemetry.num_dropped == 0


def test_events_beyond_the_bound_are_dropped_and_counted(telemetry):
    held = threading.Event()
    telemetry.show_prompts(lambda ids: str(held.wait(10)))
    telemetry.emit(start_event(time.time()))
    telemetry.emit(added(1, "en", time.time()))
    wait_for(lambda: not telemetry._queue, "the stream's thread to be busy")
    for _ in range(server_module.QUEUE_EVENTS + 500):
        telemetry.emit(ControlEvent("tick", {}, 1, time.time()))
    assert telemetry.num_dropped == 500
    held.set()
    wait_for(lambda: telemetry.latest and telemetry.latest.meta["looking"]["events_dropped"] == 500,
             "the drops to be told")  # fmt: skip


def test_a_fault_while_counting_is_reported_and_survived(telemetry):
    def broken(ids: object) -> str:
        raise ValueError("no such token")

    telemetry.show_prompts(broken)
    telemetry.emit(start_event(time.time()))
    telemetry.emit(added(1, "en", time.time()))
    wait_for(lambda: telemetry.latest and telemetry.latest.meta["looking"]["failure"], "the report")
    assert telemetry.latest.meta["looking"]["failure"] == "ValueError: no such token"
    telemetry.emit(step_event((1,), (0, 1), time.time()))
    wait_for(lambda: telemetry.latest.meta["totals"]["rows"] == 1, "counting to go on")


def test_a_client_comes_back_when_the_engine_does():
    stream = Telemetry(key=KEY, max_hz=50.0)
    port = stream.address[1]
    frames: list[Message] = []
    client = TelemetryClient(stream.address, KEY, on_frame=frames.append, retry_s=(0.02, 0.1))
    client.start()
    wait_for(lambda: client.state == "live", "the first connection")
    stream.close()
    wait_for(lambda: client.state == "gone", "the loss to be noticed")
    assert client.reason == "the engine has ended"
    again = Telemetry(key=KEY, port=port, max_hz=50.0)
    try:
        wait_for(lambda: client.state == "live", "the second connection")
        seen = len(frames)
        wait_for(lambda: len(frames) > seen, "frames of the second engine")
    finally:
        client.close()
        again.close()


def test_a_client_without_an_engine_is_connecting_and_ends_at_once():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = probe.getsockname()
    client = TelemetryClient(address, KEY, on_frame=lambda frame: None)
    client.start()
    time.sleep(0.2)
    assert client.state == "connecting"
    with pytest.raises(RequestError, match="not connected"):
        client.control("pause")
    client.close()
    assert not client._thread.is_alive()


def test_closing_leaves_no_thread_and_frees_the_port():
    before = set(threading.enumerate())
    stream = Telemetry(key=KEY)
    port = stream.address[1]
    with following(stream) as client:
        wait_for(lambda: client.state == "live", "a live client")
        stream.close()
        stream.close()
    assert set(threading.enumerate()) <= before
    Telemetry(key=KEY, port=port).close()
