"""Who gets in: every route without a key, scopes, networks, rates, and pages of other sites."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute, APIWebSocketRoute
from starlette.routing import BaseRoute

from engine.errors import ConfigError
from engine.serve.audit import Audit
from engine.serve.auth import SCOPES, Keys, add_key, remove_key, within_networks
from engine.serve.config import Limits, ServeConfig
from engine.serve.gate import Gate
from engine.serve.guard import Guard
from tests.serve.conftest import NAME, serve_config, until

OPEN = {"/healthz", "/readyz"}
"""All that is open to everybody; said here again, so that a longer list is noticed."""
BODY = {"model": NAME, "prompt": "Der Server", "max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def keyed(make_server, tmp_path_factory):
    """A service with a key for each scope; returns it and the keys."""
    folder = tmp_path_factory.mktemp("keyed")
    file = folder / "keys.json"
    keys = {scope: add_key(file, scope, [scope]) for scope in SCOPES}
    many = Limits(per_minute=100_000)  # every route is tried in every spelling
    server = make_server(token_file=file, audit_log=folder / "audit.jsonl", limits=many)
    return server, keys, folder / "audit.jsonl"


def ask(server, method="GET", path="/v1/models", key=None, **options):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    headers |= options.pop("headers", {})
    url = f"{server.url}{path}"
    # Not to read the machine's certificates each time.
    return httpx.request(method, url, headers=headers, timeout=20, verify=False, **options)


def routes(server) -> list[BaseRoute]:
    """Return every route, those of included routers too."""
    found = []
    waiting = list(server.listener._server.config.app._app.routes)
    while waiting:
        route = waiting.pop()
        if (inner := getattr(route, "original_router", None)) is not None:
            waiting += inner.routes
        else:
            found.append(route)
    return found


def raw(server, request: bytes) -> str:
    """Send bytes as they are, which no client library would, and return the status line."""
    with socket.create_connection(("127.0.0.1", server.listener.port), timeout=10) as connection:
        connection.sendall(request)
        return connection.recv(4096).split(b"\r\n")[0].decode()


def spellings(path: str) -> list[str]:
    return [path, f"/{path}", f"{path}/", path.upper(), path.replace("/", "//"), f"{path}?a=1",
            f"{path}%2f", f"/x/..{path}", f"{path};x"]  # fmt: skip


def test_every_route_asks_for_a_key(keyed):
    server, _, _ = keyed
    paths = {route.path for route in routes(server)}
    assert {"/v1/completions", "/metrics", "/v1/telemetry", "/v1/control/scale"} <= paths
    assert OPEN <= paths and len(paths) > 15
    seen = 0
    methods = ("GET", "POST", "OPTIONS")
    end = "HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    for path in sorted(paths):
        for spelling in spellings(path.replace("{name:path}", NAME)):
            for method in methods:
                line = raw(server, f"{method} {spelling} {end}".encode())
                open_to_all = spelling.split("?")[0] in OPEN
                assert (" 401 " in line) != open_to_all, (method, spelling, line)
                seen += 1
    assert seen > 400


def test_websockets_ask_for_a_key_too(keyed):
    server, _, _ = keyed
    upgrade = (
        "HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    for path in ("/v1/telemetry", "//v1/telemetry", "/v1/nothing", "/healthz/x"):
        line = raw(server, f"GET {path} {upgrade}".encode())
        assert " 401 " in line, (path, line)


def test_every_route_but_the_open_ones_says_what_its_key_must_reach(keyed):
    server, _, _ = keyed
    kinds = (APIRoute, APIWebSocketRoute)
    assert sum(isinstance(route, kinds) for route in routes(server)) > 15
    for route in routes(server):
        if isinstance(route, APIRoute | APIWebSocketRoute) and route.path not in OPEN:
            scopes = [getattr(d.call, "scope", None) for d in route.dependant.dependencies]
            assert set(scopes) & set(SCOPES), f"{route.path} has no scope"


@pytest.mark.parametrize("scope", SCOPES)
def test_a_key_reaches_as_far_as_its_scope(keyed, scope):
    server, keys, _ = keyed
    answers = {
        "infer": ask(server, "POST", "/v1/completions", keys[scope], json=BODY),
        "observe": ask(server, "GET", "/metrics", keys[scope]),
        "operate": ask(server, "GET", "/v1/control/state", keys[scope]),
    }
    for needed, answer in answers.items():
        assert answer.status_code == (200 if needed == scope else 403), (needed, answer.text)
    assert ask(server, "GET", "/v1/nothing", keys[scope]).status_code == 404


@pytest.mark.parametrize(
    "wrong",
    ["", "Bearer", "Basic KEY", "KEY", "Bearer KEYx", "Bearer trw_infer_", "Bearer trw",
     "Bearer trw_nobody_SECRET", "Bearer xyz_infer_SECRET", "Bearer trw_operate_SECRET"],
)  # fmt: skip
def test_a_key_that_is_not_quite_one(keyed, wrong):
    server, keys, _ = keyed
    secret = keys["infer"].split("_", 2)[2]
    header = wrong.replace("KEY", keys["infer"]).replace("SECRET", secret)
    answer = ask(server, "GET", "/v1/models", headers={"Authorization": header})
    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert secret not in answer.text


def test_the_open_routes_say_little(keyed):
    server, _, _ = keyed
    assert ask(server, path="/healthz").json() == {"status": "alive"}
    assert ask(server, path="/readyz").json() == {"status": "ready", "reason": None}


def test_what_was_done_stands_in_the_audit_log_without_its_words(keyed):
    server, keys, log = keyed
    start = len(log.read_text().splitlines())
    secret = "attack at dawn"
    ask(server, "POST", "/v1/completions", keys["infer"], json=BODY | {"prompt": secret})
    ask(server, "POST", f"/{secret}", keys["infer"], json={secret: secret})
    ask(server, "POST", "/v1/completions", "trw_infer_wrong", json=BODY | {"prompt": secret})
    ask(server, path="/healthz")
    text = log.read_text()
    lines = [json.loads(line) for line in text.splitlines()[start:]]
    assert "attack" not in text and keys["infer"] not in text and "wrong" not in text
    told = [(line["key"], line["operation"], line["outcome"]) for line in lines]
    assert told == [
        ("infer", "POST /v1/completions", "200"),
        ("infer", "POST (no route)", "404"),
        ("-", "POST (no route)", "401"),
    ]
    assert lines[0]["input_tokens"] > 2 and lines[0]["input_bytes"] > 50
    assert lines[0]["source"] == "127.0.0.1" and lines[0]["duration_ms"] > 0
    assert lines[2]["detail"] == "invalid_api_key"
    assert log.stat().st_mode & 0o077 == 0


def test_many_wrong_keys_are_slowed_down(make_server, tmp_path):
    file = tmp_path / "keys.json"
    key = add_key(file, "one", ["infer"])
    server = make_server(token_file=file, limits=Limits(per_minute=100))
    answers = [ask(server, key="trw_one_x").status_code for _ in range(75)]
    assert answers[:60] == [401] * 60 and 429 in answers[60:]
    assert until(lambda: ask(server, key=key).status_code == 200, 5), "for a while, not for ever"


def test_one_caller_may_call_so_often(make_server):
    server = make_server(limits=Limits(per_minute=5))
    codes = [ask(server).status_code for _ in range(7)]
    assert codes.count(429) >= 2 and codes[0] == 200
    assert ask(server, path="/readyz").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{"Host": "evil.example"}, {"Host": "127.0.0.1.evil.example"}, {"Origin": "https://evil.example"},
     {"Origin": "null"}],
)  # fmt: skip
def test_without_keys_other_sites_pages_are_kept_out(server, headers):
    assert ask(server, headers=headers).status_code == 403
    assert ask(server, headers={"Origin": "http://localhost:5006"}).status_code == 200


def test_without_keys_nobody_operates(server):
    answer = ask(server, "POST", "/v1/control/clear_policy")
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "missing_scope"


def test_a_strange_network_is_kept_out():
    answers: list[Any] = []
    gate = Gate(serve_config(allowed_networks=("10.1.0.0/16",)), None, Audit(None))
    guard = Guard(lambda *_: pytest.fail("let in"), gate)  # type: ignore[arg-type]

    async def send(message):
        answers.append(message)

    async def receive():
        return {"type": "http.request", "body": b""}

    for address in ("10.2.0.1", "::ffff:10.2.0.1", "not an address"):
        scope = {"type": "http", "path": "/healthz", "headers": [], "client": (address, 1),
                 "method": "GET"}  # fmt: skip
        asyncio.run(guard(scope, receive, send))
    assert [m["status"] for m in answers if "status" in m] == [403] * 3


@pytest.mark.parametrize(
    ("address", "inside"),
    [("10.1.2.3", True), ("::ffff:10.1.2.3", True), ("10.2.2.3", False), ("127.0.0.1", True),
     ("::1", True), ("fe80::1", False), ("", False)],
)  # fmt: skip
def test_networks(address, inside):
    assert (
        within_networks(address, serve_config(allowed_networks=("10.1.0.0/16",)).networks) is inside
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"host": "0.0.0.0"}, "needs keys"),
        ({"host": "::"}, "needs keys"),
        ({"host": "example.org"}, "needs keys"),
        ({"allowed_networks": ("10.0.0.1/8",)}, "allowed_networks"),
        ({"tls_cert": "x.pem"}, "belong together"),
        ({"port": 70000}, "port"),
        ({"drain_s": 0}, "drain_s"),
    ],
)
def test_a_config_that_lets_in_too_many_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        serve_config(**options)


def test_key_files(tmp_path):
    file = tmp_path / "keys.json"
    key = add_key(file, "one", ["infer", "observe"])
    assert file.stat().st_mode & 0o077 == 0 and key.split("_", 2)[2] not in file.read_text()
    caller = Keys.read(file).caller(f"bearer {key}")
    assert caller is not None and caller.scopes == {"infer", "observe"}
    for name, scopes, words in [
        ("one", ["infer"], "taken"),
        ("Two", ["infer"], "lower-case"),
        ("two", ["all"], "scope"),
        ("two", [], "at least one"),
    ]:
        with pytest.raises(ConfigError, match=words):
            add_key(file, name, scopes)
    add_key(file, "two", ["operate"])
    remove_key(file, "one")
    assert Keys.read(file).caller(f"Bearer {key}") is None
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        Keys.read(file)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"format": 1, "keys": {}}',
        '{"format": 2, "keys": {}}',
        '{"format": 1, "keys": {"a": {"salt": "00"}}}',
    ],
)
def test_a_damaged_key_file_is_refused(tmp_path, text):
    file = tmp_path / "keys.json"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="token_file"):
        Keys.read(file)


def test_the_key_lent_for_the_health_check_is_gone(keyed):
    server, keys, _ = keyed
    assert set(server.listener._server.config.app.gate.keys._entries) == set(SCOPES)


def test_a_service_config_cannot_be_made_by_accident(tmp_path):
    with pytest.raises(TypeError):
        ServeConfig()
