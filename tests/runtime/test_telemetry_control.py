"""Control messages through the telemetry: answered, refused, bounded."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from engine.errors import RequestError
from engine.runtime.telemetry import Telemetry
from tests.runtime.telemetry_examples import (
    KEY,
    following,
    wait_for,
)


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
