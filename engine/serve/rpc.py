"""The same operations over gRPC, with the standard health and reflection services.

Stands on `Service` as HTTP does, on the same event loop and behind the same gate. Messages are in
`proto/router.proto`; `router_pb2.py` beside it is written by

    python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. engine/serve/proto/router.proto
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from pydantic import ValidationError

from engine.errors import ConfigError, MachineError
from engine.model.sampler import Logprobs
from engine.routing.speculation import Figures
from engine.serve.control import ACTS, perform
from engine.serve.errors import not_found
from engine.serve.gate import Gate
from engine.serve.loop import Piece
from engine.serve.observe import state
from engine.serve.proto import router_pb2 as pb
from engine.serve.rpc_asked import asked_chat, asked_completion
from engine.serve.rpc_guard import RpcGuard
from engine.serve.schemas import refusal
from engine.serve.service import Asked, Service

SERVICE = pb.DESCRIPTOR.services_by_name["Router"].full_name
LOOK_S = 0.5
GRACE_S = 5.0


class Rpc:
    """A gRPC server for one service."""

    def __init__(self, service: Service, gate: Gate) -> None:
        self.port = 0
        """The port in use, once started."""
        self._service, self._gate = service, gate
        self._health = health.aio.HealthServicer()
        self._looking: asyncio.Task[None] | None = None
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Begin to answer.

        Raises:
            MachineError: the port cannot be had.
        """
        limits = self._gate.config.limits
        self._server = server = grpc.aio.server(
            interceptors=[RpcGuard(self._gate)],
            options=[
                ("grpc.max_receive_message_length", limits.body_bytes),
                ("grpc.so_reuseport", 0),
            ],
            maximum_concurrent_rpcs=limits.connections,
        )
        server.add_generic_rpc_handlers([handlers(self._service)])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        self.port = self._bound(server)
        await server.start()
        self._looking = asyncio.create_task(self._look())

    async def stop(self) -> None:
        """Let calls under way end, then end."""
        if self._looking is not None:
            self._looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._looking
        if self._server is not None:
            await self._server.stop(GRACE_S)

    def _bound(self, server: grpc.aio.Server) -> int:
        config = self._gate.config
        host = f"[{config.host}]" if ":" in config.host else config.host
        address = f"{host}:{config.grpc_port}"
        try:
            if config.tls_cert is None or config.tls_key is None:
                return server.add_insecure_port(address)
            pair = (config.tls_key.read_bytes(), config.tls_cert.read_bytes())
            return server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        except OSError as wrong:
            raise ConfigError(f"tls_cert and tls_key cannot be used: {wrong}.") from None
        except RuntimeError:
            raise MachineError(
                f"{address} cannot be listened on; take another --grpc-port."
            ) from None

    async def _look(self) -> None:
        """Let the health service say what `/readyz` says."""
        words = health_pb2.HealthCheckResponse
        while True:
            ready = self._service.reason() is None
            status = words.SERVING if ready else words.NOT_SERVING
            for name in ("", SERVICE):
                await self._health.set(name, status)
            await asyncio.sleep(LOOK_S)


def handlers(service: Service) -> grpc.GenericRpcHandler:
    """Return the handlers of `tokenrouter.v1.Router`."""

    async def models(request: pb.ModelsRequest, context: Any) -> pb.ModelsResponse:
        length = service.engine.max_model_len
        return pb.ModelsResponse(
            models=[pb.Model(id=service.config.model_name, max_model_len=length)]
        )

    async def complete(request: pb.CompletionRequest, context: Any) -> pb.CompletionResponse:
        return await _whole(service, asked_completion(request), context)

    async def chat(request: pb.ChatRequest, context: Any) -> pb.CompletionResponse:
        return await _whole(service, asked_chat(request, service.chat), context)

    async def stream_complete(
        request: pb.CompletionRequest, context: Any
    ) -> AsyncIterator[pb.CompletionPiece]:
        async for piece in _pieces(service, asked_completion(request), context):
            yield piece

    async def stream_chat(
        request: pb.ChatRequest, context: Any
    ) -> AsyncIterator[pb.CompletionPiece]:
        async for piece in _pieces(service, asked_chat(request, service.chat), context):
            yield piece

    async def status(request: pb.StatusRequest, context: Any) -> pb.JsonResponse:
        return pb.JsonResponse(json=json.dumps(state(service)))

    async def control(request: pb.ControlRequest, context: Any) -> pb.JsonResponse:
        if request.action not in ACTS:
            raise not_found()
        try:
            body = ACTS[request.action].body.model_validate_json(request.body_json or "{}")
        except ValidationError as wrong:
            raise refusal(list(wrong.errors())) from None
        answer = await perform(service, request.action, body, context.entry)
        return pb.JsonResponse(json=json.dumps(answer))

    one, many = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
    methods = {
        "Models": one(models, *_both(pb.ModelsRequest)),
        "Complete": one(complete, *_both(pb.CompletionRequest)),
        "StreamComplete": many(stream_complete, *_both(pb.CompletionRequest)),
        "Chat": one(chat, *_both(pb.ChatRequest)),
        "StreamChat": many(stream_chat, *_both(pb.ChatRequest)),
        "Status": one(status, *_both(pb.StatusRequest)),
        "Control": one(control, *_both(pb.ControlRequest)),
    }
    return grpc.method_handlers_generic_handler(SERVICE, methods)


def _both(request: Any) -> tuple[Any, Any]:
    """Return how bytes become a request, and a response bytes."""
    return request.FromString, lambda response: response.SerializeToString()


async def _whole(service: Service, asked: Asked, context: Any) -> pb.CompletionResponse:
    work = await service.prepare(asked)
    call = service.submit(work, context.entry)
    try:
        last = await service.gather(call, context.entry)
    finally:
        service.leave(call)
    choices, num_output, num_cached = [], 0, 0
    drafts = context.entry.drafts or Figures()
    for piece in last:
        done = piece.output.completion
        assert done is not None
        num_output += len(done.token_ids)
        num_cached += done.reused_tokens
        choices.append(
            pb.Choice(
                index=piece.index,
                text=done.text,
                finish_reason=done.finish_reason,
                tokens=_tokens(done.token_ids, done.logprobs),
                routing_json=_routing(piece),
                logits_sha256=done.logits_sha256 or "",
            )
        )
    prompt = work.num_prompt_tokens
    usage = pb.Usage(
        prompt_tokens=prompt,
        completion_tokens=num_output,
        total_tokens=prompt + num_output,
        cached_tokens=num_cached,
        accepted_prediction_tokens=drafts.accepted,
        rejected_prediction_tokens=drafts.proposed - drafts.accepted,
    )
    return pb.CompletionResponse(model=asked.model, choices=choices, usage=usage)


async def _pieces(
    service: Service, asked: Asked, context: Any
) -> AsyncIterator[pb.CompletionPiece]:
    work = await service.prepare(asked)
    call = service.submit(work, context.entry)
    try:
        async for piece in service.follow(call, context.entry):
            done = piece.output.completion
            yield pb.CompletionPiece(
                index=piece.index,
                text=piece.output.delta,
                tokens=_tokens(piece.output.token_ids, piece.output.logprobs),
                finish_reason=done.finish_reason if done else "",
                routing_json=_routing(piece),
            )
    finally:
        service.leave(call)


def _tokens(token_ids: tuple[int, ...], entries: tuple[Logprobs, ...]) -> list[pb.Token]:
    if not entries:
        return [pb.Token(id=token) for token in token_ids]
    return [
        pb.Token(
            id=entry.token_id,
            logprob=entry.logprob,
            top=[pb.TopLogprob(token_id=token, logprob=value) for token, value in entry.top],
        )
        for entry in entries
    ]


def _routing(piece: Piece) -> str:
    return json.dumps(piece.routing) if piece.routing is not None else ""
