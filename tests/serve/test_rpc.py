"""gRPC: the same answers as HTTP, behind the same gate, with health and reflection."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from engine.serve.auth import SCOPES, add_key
from engine.serve.proto import router_pb2 as pb
from engine.serve.rpc import SERVICE
from tests.serve.conftest import NAME, slowly, until

ROOT = Path(__file__).parents[2]
METHODS = pb.DESCRIPTOR.services_by_name["Router"].methods_by_name


@pytest.fixture(scope="module")
def served(make_server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rpc")
    keys = {scope: add_key(folder / "keys.json", scope, [scope]) for scope in SCOPES}
    server = make_server(
        token_file=folder / "keys.json", grpc_port=0, audit_log=folder / "audit.jsonl"
    )
    with grpc.insecure_channel(server.grpc_address) as channel:
        yield server, channel, keys, folder / "audit.jsonl"


@pytest.fixture
def call(served):
    """Call a method by name: `call("Complete", message)`; streams come as lists."""
    _, channel, keys, _ = served

    def run(name, request, scope="infer", **options):
        method = METHODS.get(name)
        path = f"/{SERVICE}/{name}"
        kind = channel.unary_stream if method and method.server_streaming else channel.unary_unary
        answer = getattr(pb, method.output_type.name).FromString if method else bytes
        stub = kind(path, lambda message: message.SerializeToString(), answer)
        metadata = [("authorization", f"Bearer {keys.get(scope, scope)}")] if scope else []
        done = stub(request, metadata=metadata, timeout=20, **options)
        return list(done) if method and method.server_streaming else done

    return run


def completion(*texts, **sampling):
    options = {"max_tokens": 8, "temperature": 0} | sampling
    prompts = [pb.Prompt(text=text) for text in texts or ("Der Server",)]
    return pb.CompletionRequest(model=NAME, prompts=prompts, sampling=pb.Sampling(**options))


def http(served, **options):
    server, _, keys, _ = served
    body = {"model": NAME, "prompt": "Der Server", "max_tokens": 8, "temperature": 0, **options}
    headers = {"Authorization": f"Bearer {keys['infer']}"}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).json()


def refused(code, error_code=None):
    class Check:
        def __enter__(self):
            self.raises = pytest.raises(grpc.RpcError)
            self.info = self.raises.__enter__()
            return self

        def __exit__(self, *problem):
            done = self.raises.__exit__(*problem)
            failure = self.info.value
            assert failure.code() is code, failure
            trailing = dict(failure.trailing_metadata() or ())
            assert error_code is None or trailing["error-code"] == error_code
            return done

    return Check()


def test_a_completion_says_what_http_says(call, served):
    wanted = http(served, logprobs=2, routing={"encodings": True})
    request = completion(logprobs=2)
    request.routing.CopyFrom(pb.Routing(tokens=True, encodings=True))
    answer = call("Complete", request)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (
        wanted["choices"][0]["text"],
        wanted["choices"][0]["finish_reason"],
    )
    told = wanted["choices"][0]["logprobs"]["token_logprobs"]
    assert [token.logprob for token in choice.tokens] == pytest.approx(told)
    assert all(len(token.top) == 2 for token in choice.tokens)
    routing, other = json.loads(choice.routing_json), wanted["choices"][0]["routing"]
    assert routing["tokens"] == other["tokens"] and routing["encodings"] == other["encodings"]
    assert answer.usage.total_tokens == wanted["usage"]["total_tokens"]


def test_streams_chats_tokens_and_several_prompts(call, served):
    pieces = call("StreamComplete", completion("Der Server", "12 * 7 = ", n=2))
    whole = call("Complete", completion("Der Server", "12 * 7 = ", n=2)).choices
    assert [choice.index for choice in whole] == [0, 1, 2, 3]
    for choice in whole:
        own = [piece for piece in pieces if piece.index == choice.index]
        assert "".join(piece.text for piece in own) == choice.text
        assert own[-1].finish_reason == choice.finish_reason
    ids = served[0].service.engine.tokenizer.encode("Der Server")
    request = completion()
    request.prompts[0].tokens.ids.extend(ids)
    assert call("Complete", request).choices[0].text == whole[0].text
    chat = pb.ChatRequest(
        model=NAME,
        messages=[pb.Message(role="user", content="Der Server")],
        sampling=pb.Sampling(max_tokens=8, temperature=0),
    )
    assert call("Chat", chat).choices[0].text == whole[0].text
    assert "".join(p.text for p in call("StreamChat", chat)) == whole[0].text
    assert call("Models", pb.ModelsRequest()).models[0].id == NAME


def test_a_caller_who_leaves_ends_what_runs(served):
    server, channel, keys, _ = served
    stub = channel.unary_stream(
        f"/{SERVICE}/StreamComplete",
        lambda message: message.SerializeToString(),
        pb.CompletionPiece.FromString,
    )
    before = server.service.loop.books.aborted
    metadata = [("authorization", f"Bearer {keys['infer']}")]
    with slowly(server):
        stream = stub(completion(max_tokens=400, ignore_eos=True), metadata=metadata)
        next(stream)
        stream.cancel()
        assert until(lambda: server.service.loop.books.aborted == before + 1)
    assert until(lambda: server.service.loop.books.running == 0)


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (completion(max_tokens=10**9), "context_length_exceeded"),
        (completion(max_tokens=-1), "invalid_value"),
        (completion(temperature=-1.0), "invalid_value"),
        (completion(n=1000), "invalid_value"),
        (completion(priority=101), "invalid_value"),
        (completion(""), "empty_prompt"),
        (pb.CompletionRequest(model=NAME), "invalid_value"),
        (pb.CompletionRequest(model=NAME, prompts=[pb.Prompt()]), "empty_prompt"),
        (pb.CompletionRequest(model=NAME, prompts=[pb.Prompt(tokens=pb.Tokens(ids=[4096]))]),
         "invalid_value"),
        (pb.CompletionRequest(model=NAME, prompts=[pb.Prompt(tokens=pb.Tokens(ids=[-1]))]),
         "invalid_value"),
    ],
)  # fmt: skip
def test_what_http_refuses_is_refused_here(call, request_, code):
    before = call("Complete", completion()).choices[0].text
    with refused(grpc.StatusCode.INVALID_ARGUMENT, code):
        call("Complete", request_)
    assert call("Complete", completion()).choices[0].text == before


def test_another_model_is_not_found(call):
    request = completion()
    request.model = "another"
    with refused(grpc.StatusCode.NOT_FOUND, "model_not_found"):
        call("Complete", request)


@pytest.mark.parametrize("name", [*METHODS, "Nothing"])
def test_every_method_asks_for_a_key(call, name):
    kinds = {"Complete": completion(), "StreamComplete": completion()}
    method = METHODS.get(name)
    request = kinds.get(name) or (getattr(pb, method.input_type.name)() if method else completion())
    for key in (None, "trw_infer_wrong"):
        with refused(grpc.StatusCode.UNAUTHENTICATED, "invalid_api_key"):
            call(name, request, scope=key)


def test_scopes_hold_here_too(call):
    assert json.loads(call("Status", pb.StatusRequest(), "observe").json)["ready"] is True
    done = call("Control", pb.ControlRequest(action="clear_policy"), "operate")
    assert json.loads(done.json)["state"]["banned"] == []
    for name, request, scope in [
        ("Status", pb.StatusRequest(), "infer"),
        ("Control", pb.ControlRequest(action="clear_policy"), "observe"),
        ("Complete", completion(), "operate"),
    ]:
        with refused(grpc.StatusCode.PERMISSION_DENIED, "missing_scope"):
            call(name, request, scope)


@pytest.mark.parametrize(
    ("action", "body", "code"),
    [
        ("nothing", "{}", grpc.StatusCode.NOT_FOUND),
        ("ban_expert", '{"expert": true}', grpc.StatusCode.INVALID_ARGUMENT),
        (
            "inject_fault",
            '{"fault": "gate.logits", "delay_ms": 1, "lease_s": 1}',
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        ("ban_expert", "{", grpc.StatusCode.INVALID_ARGUMENT),
        ("ban_expert", '{"expert": 9}', grpc.StatusCode.FAILED_PRECONDITION),
        ("scale", '{"ranks": 2}', grpc.StatusCode.FAILED_PRECONDITION),
    ],
)
def test_operators_acts_that_cannot_be(call, action, body, code):
    with refused(code):
        call("Control", pb.ControlRequest(action=action, body_json=body), "operate")


def test_health_is_open_and_says_what_readyz_says(served):
    server, channel, _, _ = served
    stub = health_pb2_grpc.HealthStub(channel)
    for name in ("", SERVICE):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with refused(grpc.StatusCode.NOT_FOUND):
        stub.Check(health_pb2.HealthCheckRequest(service="another"), timeout=5)
    server.service.health._draining = True
    try:
        request = health_pb2.HealthCheckRequest()
        down = health_pb2.HealthCheckResponse.NOT_SERVING
        assert until(lambda: stub.Check(request, timeout=5).status == down)
    finally:
        server.service.health._draining = False


def test_reflection_describes_the_service_to_those_with_a_key(served):
    server, channel, keys, _ = served

    class WithKey(grpc.StreamStreamClientInterceptor):
        def intercept_stream_stream(self, continuation, details, requests):
            metadata = [("authorization", f"Bearer {keys['infer']}")]
            return continuation(details._replace(metadata=metadata), requests)

    database = ProtoReflectionDescriptorDatabase(grpc.intercept_channel(channel, WithKey()))
    assert SERVICE in database.get_services()
    pool = descriptor_pool.DescriptorPool(database)
    assert "StreamChat" in pool.FindServiceByName(SERVICE).methods_by_name
    with refused(grpc.StatusCode.UNAUTHENTICATED):
        ProtoReflectionDescriptorDatabase(channel).get_services()


def test_calls_stand_in_the_audit_log_without_their_words(call, served):
    log = served[3]
    start = len(log.read_text().splitlines())
    call("Complete", completion("attack at dawn"))
    with refused(grpc.StatusCode.UNAUTHENTICATED):
        call("Complete", completion("attack at dawn"), "trw_infer_wrong")
    assert until(lambda: len(log.read_text().splitlines()) == start + 2)
    lines = [json.loads(line) for line in log.read_text().splitlines()[start:]]
    assert "attack" not in log.read_text()
    lines.sort(key=lambda line: line["outcome"])
    assert [(line["key"], line["outcome"]) for line in lines] == [
        ("infer", "OK"),
        ("-", "UNAUTHENTICATED"),
    ]
    assert lines[0]["operation"] == f"gRPC /{SERVICE}/Complete"
    assert lines[0]["source"] == "127.0.0.1" and lines[0]["input_tokens"] > 2


def test_the_written_messages_are_those_of_the_proto_file(tmp_path):
    folder = "engine/serve/proto"
    done = subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--python_out={tmp_path}",
         f"--pyi_out={tmp_path}", f"{folder}/router.proto"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name in ("router_pb2.py", "router_pb2.pyi"):
        assert (tmp_path / folder / name).read_text() == (ROOT / folder / name).read_text()
