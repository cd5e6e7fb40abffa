"""Who has no key, or talks nonsense, sees nothing and harms nobody."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

import pytest

from engine.runtime.telemetry import Message, TelemetryClient
from engine.runtime.telemetry.wire import (
    Kind,
    encode,
)
from tests.runtime.telemetry_examples import (
    KEY,
    following,
    raw_viewer,
    receive,
    wait_for,
)


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
