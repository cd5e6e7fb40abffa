"""`workbench verify`: passes our service, and fails one that is broken in any of many ways.

The broken ones are our own service seen through a proxy that changes answers.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

import httpx
import pytest

FEW = ("--requests", "16", "--max-tokens", "8", "--max-skew", "8")
NAMES = ("connectivity", "output format", "concurrent requests", "expert load", "log",
         "identical repeats")  # fmt: skip

Change = Callable[[str, Any], Any]


class Stub(ThreadingHTTPServer):
    request_queue_size = 64


@pytest.fixture(scope="module")
def server(make_server):
    """A service of this module's own: what others did to theirs does not stand in its log."""
    return make_server({"prefix_reuse": True})


@pytest.fixture
def proxy(server) -> Iterator[Callable[[Change], str]]:
    """Return the address of a service whose answers are changed; `change(path, content)`."""
    open_ones: list[ThreadingHTTPServer] = []
    client = httpx.Client(base_url=server.url, timeout=30)

    def make(change: Change) -> str:
        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                headers = {"Content-Type": self.headers.get("content-type", "")}
                got = client.request(self.command, self.path, content=body, headers=headers)
                data = got.content
                if "json" in got.headers["content-type"]:
                    data = json.dumps(change(self.path, got.json())).encode()
                elif b"data: " in data:
                    data = change(self.path, data)
                self.send_response(got.status_code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = answer

            def log_message(self, *_: Any) -> None:
                pass

        stub = Stub(("127.0.0.1", 0), Handler)
        threading.Thread(target=stub.serve_forever, daemon=True).start()
        open_ones.append(stub)
        return f"http://127.0.0.1:{stub.server_port}"

    yield make
    for stub in open_ones:
        stub.shutdown()
        stub.server_close()
    client.close()


def statuses(done) -> dict[str, str]:
    report = json.loads(done.out)
    assert [check["name"] for check in report["checks"]] == list(NAMES)
    assert report["passed"] is (done.code == 0)
    return {check["name"]: check["status"] for check in report["checks"]}


def test_our_service_is_accepted(server, workbench):
    done = workbench("verify", server.url, *FEW, "--capacity-factor", "8", "--json")
    assert set(statuses(done).values()) == {"passed"}, done.out
    found = {check["name"]: check for check in json.loads(done.out)["checks"]}
    assert found["concurrent requests"]["requests"] == 16
    assert "even share" in found["expert load"]["found"]
    assert "capacity factor 8" in found["expert load"]["found"]
    text = workbench("verify", server.url, *FEW)
    assert text.code == 0 and text.out.rstrip().endswith("Accepted.")


def test_the_openai_part_asks_for_nothing_else(server, workbench, proxy):
    asked = set()

    def plain(path: str, content: Any) -> Any:
        asked.add(path)
        for choice in content.get("choices", []) if isinstance(content, dict) else []:
            choice.pop("routing", None)
        return content

    done = workbench("verify", f"{proxy(plain)}/v1", *FEW, "--openai", "--json")
    told = statuses(done)
    assert done.code == 0 and told["expert load"] == told["log"] == "skipped"
    assert asked == {"/v1/models", "/v1/completions", "/v1/chat/completions"}
    assert workbench("verify", proxy(plain), *FEW).code == 1, "ours must tell its routing"


def choices(content: Any) -> list[dict[str, Any]]:
    found = content.get("choices", []) if isinstance(content, dict) else []
    return found if isinstance(found, list) else []


def says_200(path: str, content: Any) -> Any:
    return {} if isinstance(content, dict) else b""


def dropping(*fields: str) -> Change:
    def change(path: str, content: Any) -> Any:
        for part in (content, *choices(content)) if isinstance(content, dict) else ():
            for field in fields:
                part.pop(field, None)
        return content

    return change


def slow(path: str, content: Any) -> Any:
    time.sleep(0.4)
    return content


NUMBERS = count()


def unrepeatable(path: str, content: Any) -> Any:
    for choice in choices(content):
        if "text" in choice:
            choice["text"] += str(next(NUMBERS))
    return content


def drifting(path: str, content: Any) -> Any:
    for choice in choices(content):
        if choice.get("logprobs") and "token_logprobs" in choice["logprobs"]:
            values = choice["logprobs"]["token_logprobs"]
            choice["logprobs"]["token_logprobs"] = [v - 0.01 * next(NUMBERS) for v in values]
    return content


def routing(change: Callable[[dict[str, Any]], None]) -> Change:
    def apply(path: str, content: Any) -> Any:
        for choice in choices(content):
            if "routing" in choice:
                change(choice["routing"])
        return content

    return apply


def status(change: Callable[[dict[str, Any]], None]) -> Change:
    def apply(path: str, content: Any) -> Any:
        if path == "/v1/status":
            change(content)
        return content

    return apply


def lame_expert(state: dict[str, Any]) -> None:
    for counts in state["totals"]["expert_counts"]:
        counts[2] = 0


BROKEN = {
    "says 200 and nothing else": (says_200, NAMES[0]),
    "no usage": (dropping("usage"), NAMES[1]),
    "no finish reason": (dropping("finish_reason"), NAMES[1]),
    "no text": (dropping("text"), NAMES[1]),
    "no routing": (dropping("routing"), NAMES[1]),
    "a row too few": (routing(lambda r: r["tokens"].pop()), NAMES[1]),
    "another expert": (
        routing(lambda r: r["tokens"][0]["experts"][0].reverse()), NAMES[1]),
    "a weight that is none": (
        routing(lambda r: r["tokens"][1]["weights"][0].__setitem__(0, None)), NAMES[1]),
    "no counts": (routing(lambda r: r["summary"].pop("expert_counts")), NAMES[1]),
    "a stream cut short": (
        lambda path, content: content[:-20] if isinstance(content, bytes) else content, NAMES[1]),
    "another text in the stream": (
        lambda path, content: content.replace(b'"text":"', b'"text":"x')
        if isinstance(content, bytes) else content, NAMES[1]),
    "slow": (slow, NAMES[2]),
    "an expert without rows": (status(lame_expert), NAMES[3]),
    "a traceback": (status(lambda s: s["log"].update(tracebacks=1)), NAMES[4]),
    "a row that was broken": (status(lambda s: s["totals"].update(bad_rows=3)), NAMES[4]),
    "a request that is lost": (status(lambda s: s["requests"].update(started=9999)), NAMES[4]),
    "another text each time": (unrepeatable, NAMES[5]),
    "other logits each time": (drifting, NAMES[5]),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_service_fails_the_check_it_breaks(name, workbench, proxy):
    change, failing = BROKEN[name]
    healthy = {"slow", "a traceback", "a row that was broken", "a request that is lost",
               "an expert without rows", "other logits each time"}  # fmt: skip
    few = FEW if name in healthy else ("--requests", "2", "--max-tokens", "4")
    mean_s = "0.35" if name == "slow" else "20"
    done = workbench("verify", proxy(change), *few, "--mean-s", mean_s, "--p99-s", "60", "--json")
    told = statuses(done)
    assert done.code == 1 and told[failing] == "failed", (name, done.out)
    if name in healthy:
        assert list(told.values()).count("failed") == 1, done.out


def test_nobody_there_is_one_sentence(workbench):
    done = workbench("verify", "http://127.0.0.1:9", *FEW)
    assert done.code == 1 and "does not answer" in done.out and "Traceback" not in done.err
    workbench("verify", "127.0.0.1:9").assert_refused(2, "url")
