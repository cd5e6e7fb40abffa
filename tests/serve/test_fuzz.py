"""What nobody would send, by the thousand (`make service`): all refused, and no harm done."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from engine.serve.config import Limits
from tests.serve.conftest import NAME

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_BODIES = 10_000
GOOD: dict[str, Any] = {"model": NAME, "prompt": "Der Server", "max_tokens": 2, "temperature": 0}
ODD: list[Any] = [None, True, -1, 0, 1.5, 2**31, 2**63, 10**400, "", "5", "\u0000", "x" * 5000, [],
                  {}, [[]], [None], {"a": {}}, [[[[]]]], "\ud800", float("nan")]  # fmt: skip


def mutated(rng: random.Random) -> bytes:
    """Return a body that is broken in one of many ways."""
    body = dict(GOOD)
    for _ in range(rng.randint(1, 3)):
        key = rng.choice([*body, "n", "stop", "seed", "logprobs", "routing", "stream", "zzz"])
        body[key] = rng.choice(ODD)
    raw = json.dumps(body).encode("utf-8", "surrogatepass")
    kind = rng.randint(0, 4)
    if kind == 0:
        return raw[: rng.randint(0, len(raw) - 1)]
    if kind == 1:
        at = rng.randint(0, len(raw) - 1)
        return raw[:at] + bytes([rng.randint(0, 255)]) + raw[at + 1 :]
    if kind == 2:
        return bytes(rng.randint(0, 255) for _ in range(rng.randint(0, 200)))
    return raw


def test_ten_thousand_malformed_bodies(make_server):
    server = make_server({"prefix_reuse": True}, limits=Limits(per_minute=10**6))
    rng = random.Random(7)
    codes: dict[int, int] = {}
    with httpx.Client(base_url=server.url, timeout=30) as client:

        def good() -> Any:
            return client.post("/v1/completions", json=GOOD).json()["choices"]

        wanted = good()
        for number in range(NUM_BODIES):
            path = rng.choice(["/v1/completions", "/v1/chat/completions"])
            raw = mutated(rng)
            answer = client.post(path, content=raw, headers={"Content-Type": "application/json"})
            # A change may leave a body right, such as n: null; then it is simply answered.
            assert answer.status_code == 200 or 400 <= answer.status_code < 500, (path, raw)
            if answer.status_code != 200:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            codes[answer.status_code] = codes.get(answer.status_code, 0) + 1
            if number % 1000 == 0:
                assert good() == wanted
        assert good() == wanted
    print(f"\n{NUM_BODIES} bodies: {codes}")
    assert codes[400] > 0.8 * NUM_BODIES
    assert server.service.journal.summary()["tracebacks"] == 0
    assert server.service.loop.books.failed == 0


def test_the_published_description_against_the_service(make_server):
    """schemathesis: whatever fits the description, and what does not, never breaks the service."""
    server = make_server({"prefix_reuse": True}, limits=Limits(per_minute=10**6))
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")

    operations = list(schema.get_all_operations())
    assert len(operations) > 10
    for operation in operations:
        strategy = operation.ok().as_strategy()
        _tried(strategy)
    assert server.service.journal.summary()["tracebacks"] == 0
    assert server.service.loop.books.failed == 0


def _tried(strategy: Any) -> None:
    @given(case=strategy)
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    def check(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body["stream"] = False
        answer = case.call(timeout=30)
        assert answer.status_code < 500, answer.text

    check()
