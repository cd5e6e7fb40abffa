"""Events and viewers that the tests of the telemetry share."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator

import numpy as np

from engine.events import RequestEvent, StartEvent, StepEvent
from engine.runtime.telemetry import Message, Telemetry, TelemetryClient
from engine.runtime.telemetry.wire import (
    Kind,
    Splitter,
    encode,
    proof,
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
        stage_ms={"attention": 6.0, "experts": 3.0, "select": 0.2, "place": 0.1, "sort": 0.3},
        bad_rows=0,
    )


def added(request_id: int, label: str, time_s: float = 100.0) -> RequestEvent:
    return RequestEvent(request_id, "added", label, time_s, prompt_token_ids=(7, 8))


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"never came: {what}"
        time.sleep(0.005)


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


def next_frame(connection: socket.socket, splitter: Splitter) -> Message:
    while True:
        for message in receive(connection, splitter):
            if message.kind is Kind.FRAME:
                return message
