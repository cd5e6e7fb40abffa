"""The telemetry stream: frames, drops, acknowledgements, keys, garbage, many and slow viewers."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np
import pytest

from engine.errors import RequestError
from engine.events import ControlEvent, RequestEvent, StartEvent, StepEvent, TextEvent
from engine.runtime.telemetry import Aggregator, Message, Telemetry, TelemetryClient
from engine.runtime.telemetry import server as server_module
from engine.runtime.telemetry import viewer as viewer_module
from engine.runtime.telemetry.wire import (
    Kind,
    Splitter,
    WireError,
    decode,
    encode,
    proof,
    proves,
)

LAYERS, EXPERTS, TOP_K = 3, 5, 2
KEY = bytes(range(32))


def start_event(time_s: float = 100.0) -> StartEvent:
    return StartEvent(
        model="tiny",
        num_layers=LAYERS,
        moe_layers=tuple(range(LAYERS)),
        num_experts=EXPERTS,
        top_k=TOP_K,
        num_devices=1,
        rank_of_phy=(0,) * EXPERTS,
        table_version=1,
        deterministic=False,
        dtype="float32",
        time_s=time_s,
    )


def step_event(
    request_ids: tuple[int, ...], experts: tuple[int, int], time_s: float = 100.0
) -> StepEvent:
    rows = len(request_ids)
    ids = np.tile(np.array(experts, np.int16), (rows, LAYERS, 1))
    return StepEvent(
        step=1,
        time_s=time_s,
        duration_ms=10.0,
        table_version=1,
        num_running=rows,
        num_waiting=2,
        num_prefill_rows=0,
        request_ids=np.array(request_ids, np.int64),
        positions=np.zeros(rows, np.int32),
        token_ids=np.zeros(rows, np.int32),
        homes=np.zeros(rows, np.int16),
        causes=np.zeros(rows, np.uint8),
        topk_ids=ids,
        phy_ids=ids,
        topk_weights=np.ones((rows, LAYERS, TOP_K), np.float32),
        margins=np.zeros((rows, LAYERS), np.float32),
        stage_ms={"attention": 6.0, "experts": 3.0, "select": 0.2, "place": 0.1, "dispatch": 0.3},
        bad_rows=0,
    )


def added(request_id: int, label: str, time_s: float = 100.0) -> RequestEvent:
    return RequestEvent(request_id, "added", label, time_s, prompt_token_ids=(7, 8))


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"never came: {what}"
        time.sleep(0.005)


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    stream = Telemetry(key=KEY, max_hz=50.0)
    yield stream
    stream.close()


@contextlib.contextmanager
def following(stream: Telemetry, key: bytes = KEY, on_frame=None) -> Iterator[TelemetryClient]:
    client = TelemetryClient(stream.address, key, on_frame=on_frame or (lambda frame: None))
    client.start()
    try:
        yield client
    finally:
        client.close()


@contextlib.contextmanager
def raw_viewer(stream: Telemetry, key: bytes = KEY) -> Iterator[tuple[socket.socket, Splitter]]:
    """Connect by hand, prove the key, and read nothing more."""
    with socket.create_connection(stream.address, timeout=10) as connection:
        splitter = Splitter(1 << 20)
        (challenge,) = receive(connection, splitter)
        meta = {"proof": proof(key, "viewer", challenge.meta["nonce"]), "nonce": "n"}
        connection.sendall(encode(Message(Kind.HELLO, meta=meta)))
        yield connection, splitter


def receive(connection: socket.socket, splitter: Splitter) -> list[Message]:
    while True:
        data = connection.recv(1 << 16)
        if not data:
            raise ConnectionResetError
        messages = splitter.feed(data)
        if messages:
            return messages


# ---- the wire


def test_a_message_comes_back_as_it_was_sent():
    message = Message(
        Kind.FRAME,
        seq=2**40,
        time_s=12.5,
        meta={"text": "Grüße, мир", "n": [1, None]},
        arrays={
            "a": np.arange(6, dtype="<i4").reshape(2, 3),
            "none": np.zeros((0, 3, 5), "<i8"),
            "odd": np.arange(5, dtype="|u1"),
            "strided": np.arange(12, dtype="<f4").reshape(3, 4)[:, ::2],
        },
    )
    (back,) = Splitter(1 << 20).feed(encode(message))
    assert (back.kind, back.seq, back.time_s, back.meta) == (
        Kind.FRAME,
        2**40,
        12.5,
        message.meta,
    )
    assert list(back.arrays) == list(message.arrays)
    for name, array in message.arrays.items():
        assert back.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(back.arrays[name], array)


def test_messages_arrive_whole_however_the_bytes_are_cut():
    stream = b"".join(encode(Message(Kind.ACK, seq=seq)) for seq in range(1, 6))
    for size in (1, 3, 7, 41, len(stream)):
        splitter = Splitter(1 << 10)
        got = [
            message.seq
            for at in range(0, len(stream), size)
            for message in splitter.feed(stream[at : at + size])
        ]
        assert got == [1, 2, 3, 4, 5]


def test_every_cut_or_flipped_byte_is_refused_or_read_as_a_message():
    good = encode(Message(Kind.FRAME, 1, 1.0, {"k": 1}, {"a": np.arange(3, dtype="<i4")}))[4:]
    for length in range(len(good)):
        with pytest.raises(WireError):
            decode(good[:length])
    refused = 0
    for at in range(len(good)):
        for bit in range(8):
            bad = bytearray(good)
            bad[at] ^= 1 << bit
            try:
                decode(bytes(bad))
            except WireError:
                refused += 1
    assert refused > len(good), "most flips in head and listing must be noticed"


@pytest.mark.parametrize(
    ("listing", "word"),
    [
        ("x", "malformed"),
        ([["a", "|O", [1]]], "malformed"),
        ([["a", "<i4", [-1]]], "malformed"),
        ([["a", "<i4", [2**40]]], "malformed"),
        ([["a", "<i4", [2**20, 2**20, 2**20]]], "past the end"),
        ([["a", "<i4", [1, 1, 1, 1, 1]]], "malformed"),
        ([["a", "<i4", [True]]], "malformed"),
        ([[1, "<i4", [1]]], "malformed"),
        ([[]] * 100, "malformed"),
        ([], "left over"),
    ],
)
def test_a_listing_that_lies_about_the_bytes_is_refused(listing, word):
    meta = json.dumps({"arrays": listing}).encode()
    meta += b" " * (-len(meta) % 8)
    head = struct.pack("<4sHHQdII", b"TRWF", 1, Kind.FRAME, 1, 0.0, len(meta), 0)
    with pytest.raises(WireError, match=word):
        decode(head + meta + b"\0" * 8)


def test_another_version_is_refused_by_name():
    bad = bytearray(encode(Message(Kind.ACK))[4:])
    bad[4] = 9
    with pytest.raises(WireError, match="version 9 is not 1"):
        decode(bytes(bad))


def test_a_proof_shows_the_key_for_one_role_and_nonce():
    given = proof(KEY, "viewer", "abc")
    assert proves(KEY, "viewer", "abc", given)
    for wrong in (
        proof(KEY[::-1], "viewer", "abc"),
        proof(KEY, "engine", "abc"),
        proof(KEY, "viewer", "abd"),
        given[:-1],
        "",
        "ü",
        None,
        7,
    ):
        assert not proves(KEY, "viewer", "abc", wrong)
    assert KEY.hex() not in given


# ---- the sums


def test_counts_stand_by_domain_layer_and_expert():
    sums = Aggregator()
    sums.add([start_event(), added(1, "en"), added(2, "de")])
    sums.add([step_event((1, 1, 2), (0, 3)), step_event((2,), (4, 3))])
    frame = sums.frame(1, 100.1)
    assert frame.meta["domains"] == ["en", "de"]
    expected = np.zeros((2, LAYERS, EXPERTS), int)
    expected[0, :, 0] = expected[0, :, 3] = 2
    expected[1, :, 0] = 1
    expected[1, :, 3] = 2
    expected[1, :, 4] = 1
    np.testing.assert_array_equal(frame.arrays["total"], expected)
    np.testing.assert_array_equal(frame.arrays["counts"], expected.sum(axis=0))
    assert frame.arrays["total"].sum() == frame.meta["totals"]["rows"] * LAYERS * TOP_K

    sums.add([step_event((1,), (1, -1), 100.2)])
    later = sums.frame(2, 100.3)
    assert later.arrays["counts"].tolist() == [[0, 1, 0, 0, 0]] * LAYERS, "-1 is no expert"
    assert (later.arrays["total"] - frame.arrays["total"]).sum() == LAYERS


def test_rates_latency_and_overhead_have_their_formulas():
    sums = Aggregator(prompt_text=lambda ids: f"prompt {ids}")
    sums.add([start_event(100.0), added(1, "en", 100.0)])
    for n in range(20):
        at = 100.0 + 0.1 * n
        sums.add([step_event((1, 1, 1), (0, 1), at), TextEvent(1, "en", "a", n + 1, False, at)])
    meta = sums.frame(1, 102.0).meta
    assert meta["generated_per_s"] == pytest.approx(10.0)
    assert meta["rows_per_s"] == pytest.approx(30.0)
    assert meta["step_p50_ms"] == pytest.approx(10.0)
    assert meta["overhead_share"] == pytest.approx((0.2 + 0.1 + 0.3) / 10.0)
    assert meta["stage_ms"]["attention"] == pytest.approx(6.0)
    assert (meta["num_running"], meta["num_waiting"]) == (3, 2)
    assert meta["idle_s"] == pytest.approx(0.09)
    (request,) = meta["requests"]
    assert request["text"] == "a" * 20 and request["num_tokens"] == 20
    assert request["prompt"] == "prompt (7, 8)"


def test_an_idle_engine_counts_to_zero():
    sums = Aggregator()
    sums.add([start_event(), added(1, "en"), step_event((1,), (0, 1))])
    sums.frame(1, 100.0)
    meta = sums.frame(2, 160.0).meta
    assert meta["rows_per_s"] == meta["generated_per_s"] == 0.0
    assert meta["step_p50_ms"] is None and meta["overhead_share"] is None
    assert sums.frame(3, 160.1).arrays["smoothed"].max() < 1e-6
    assert sums.frame(3, 160.2).arrays["counts"].sum() == 0


def test_smoothed_counts_fade_with_their_time_constant():
    sums = Aggregator()
    sums.add([start_event(), added(1, "en"), step_event((1,), (0, 1))])
    first = sums.frame(1, 100.0).arrays["smoothed"].sum()
    later = sums.frame(2, 103.0).arrays["smoothed"].sum()
    assert first == LAYERS * TOP_K
    assert later == pytest.approx(first / np.e, rel=1e-5)


def test_a_new_engine_starts_from_nothing():
    sums = Aggregator()
    sums.add([start_event(), added(1, "en"), step_event((1,), (0, 1)), start_event(101.0)])
    frame = sums.frame(1, 101.0)
    assert frame.arrays["total"].sum() == 0 and frame.meta["totals"]["steps"] == 0
    assert frame.meta["requests"] == [] and frame.meta["step"] is None


def test_finished_requests_linger_and_leave():
    sums = Aggregator()
    done = RequestEvent(1, "finished", "en", 101.0, finish_reason="stop")
    sums.add([start_event(), added(1, "en"), added(2, "de"), done])
    listed = {r["id"]: r["state"] for r in sums.frame(1, 101.1).meta["requests"]}
    assert listed == {1: "stop", 2: "running"}
    sums.frame(2, 110.0)
    assert [r["id"] for r in sums.frame(3, 110.1).meta["requests"]] == [2]


def test_what_is_held_stays_bounded():
    sums = Aggregator()
    sums.add([start_event()])
    for n in range(200):
        sums.add([added(n, f"domain {n}"), TextEvent(n, "", "x" * 5000, 1, False, 100.0)])
    sums.add([step_event((199,), (0, 1)), ControlEvent("publish_table", {}, 2, 100.0)])
    frame = sums.frame(1, 100.1)
    assert len(frame.meta["domains"]) == 32 and frame.meta["domains"][-1] == "other"
    assert frame.arrays["total"][-1].sum() == LAYERS * TOP_K
    assert len(frame.meta["requests"]) == 32 and frame.meta["num_requests"] == 200
    assert max(len(r["text"]) for r in frame.meta["requests"]) == 400
    assert frame.meta["controls"][0]["action"] == "publish_table"
    assert frame.meta["table_version"] == 2


# ---- the stream


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


def test_a_wrong_key_is_told_and_sees_nothing(telemetry):
    frames: list[Message] = []
    with following(telemetry, key=b"wrong" * 8, on_frame=frames.append) as client:
        wait_for(lambda: client.state == "refused", "a refusal")
        assert client.reason == "the key is wrong"
    assert not frames and telemetry.num_viewers == 0


def test_an_impostor_on_the_port_is_not_believed():
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        seen: list[bytes] = []

        def play() -> None:
            connection, _ = impostor.accept()
            with connection:
                connection.sendall(encode(Message(Kind.CHALLENGE, meta={"nonce": "x"})))
                seen.append(connection.recv(4096))
                connection.sendall(encode(Message(Kind.WELCOME, meta={"proof": "0" * 64})))
                connection.sendall(encode(Message(Kind.FRAME, seq=1)))

        thread = threading.Thread(target=play)
        thread.start()
        frames: list[Message] = []
        client = TelemetryClient(impostor.getsockname(), KEY, on_frame=frames.append)
        client.start()
        wait_for(lambda: client.state == "refused", "the client to notice")
        client.close()
        thread.join()
    assert not frames and KEY not in seen[0] and KEY.hex().encode() not in seen[0]


GARBAGE = {
    "text": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "huge length": b"\xff" * 64,
    "zeros": b"\0" * 4096,
    "length without head": struct.pack("<I", 3) + b"abc",
    "half a message": encode(Message(Kind.ACK))[:-3],
    "ack before hello": encode(Message(Kind.ACK, seq=1)),
    "hello without proof": encode(Message(Kind.HELLO)),
    "hello of other types": encode(Message(Kind.HELLO, meta={"proof": [1], "nonce": 2})),
    "deep json": encode(Message(Kind.HELLO))[:-8],
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_from_strangers_leaves_the_stream_alive(telemetry, name):
    with socket.create_connection(telemetry.address, timeout=10) as stranger:
        stranger.sendall(GARBAGE[name])
    with following(telemetry) as client:
        wait_for(lambda: client.state == "live", "a client after the garbage")
    assert telemetry.latest is None or telemetry.latest.meta["looking"]["failure"] is None


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"id": 1},
        {"id": 1, "action": 7},
        {"id": 1, "action": "x", "detail": []},
        {"id": [], "action": "x", "detail": {}},
    ],
)
def test_a_malformed_control_message_ends_that_viewer_alone(telemetry, meta):
    with raw_viewer(telemetry) as (connection, splitter), following(telemetry) as client:
        connection.sendall(encode(Message(Kind.CONTROL, meta=meta)))
        with contextlib.suppress(ConnectionResetError):
            while receive(connection, splitter)[-1].kind is not Kind.REFUSED:
                pass
        wait_for(lambda: client.state == "live" and telemetry.num_viewers == 1, "one viewer")


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


def next_frame(connection: socket.socket, splitter: Splitter) -> Message:
    while True:
        for message in receive(connection, splitter):
            if message.kind is Kind.FRAME:
                return message


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


# ---- control messages


def test_control_messages_are_answered_by_the_callback():
    later: Future[dict[str, int]] = Future()

    def on_control(action: str, detail: dict) -> object:
        match action:
            case "double":
                return {"value": 2 * detail["value"]}
            case "later":
                return later
            case "nothing":
                return None
            case "bad":
                return {"value": object()}
            case "broken":
                raise KeyError("secret detail")
        raise RequestError(f"unknown action {action!r}.")

    stream = Telemetry(key=KEY, max_hz=50.0, on_control=on_control)
    try:
        with following(stream) as client:
            wait_for(lambda: client.state == "live", "a live client")
            assert client.control("double", value=21) == {"value": 42}
            assert client.control("nothing") == {}
            with pytest.raises(RequestError, match="unknown action 'fly'"):
                client.control("fly")
            with pytest.raises(RequestError, match=r"^the engine failed to do this \(KeyError\)"):
                client.control("broken")
            threading.Timer(0.1, later.set_result, ({"value": 7},)).start()
            assert client.control("later") == {"value": 7}
            with pytest.raises(RequestError, match="failed"):
                client.control("bad")
            assert client.control("double", value=1) == {"value": 2}
    finally:
        stream.close()


def test_an_engine_without_a_callback_refuses_with_a_reason(telemetry):
    with following(telemetry) as client:
        wait_for(lambda: client.state == "live", "a live client")
        with pytest.raises(RequestError, match="takes no control messages"):
            client.control("pause")


def test_a_control_message_that_is_too_long_is_not_taken():
    taken: list[str] = []
    stream = Telemetry(key=KEY, on_control=lambda action, detail: taken.append(action))
    try:
        with following(stream) as client:
            wait_for(lambda: client.state == "live", "a live client")
            with pytest.raises(RequestError):
                client.control("long", text="x" * (70 << 10))
    finally:
        stream.close()
    assert taken == []
