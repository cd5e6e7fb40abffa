"""The routes that the unmodified `openai` client calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.serve.answers import Answer, ChatAnswer, CompletionAnswer
from engine.serve.audit import Entry
from engine.serve.errors import ApiError, invalid
from engine.serve.guard import LEFT, needs
from engine.serve.loop import Call
from engine.serve.schemas import ChatRequest, CompletionRequest
from engine.serve.service import Asked, Prompt, Service, Work, sampling
from engine.serve.stream import CallerLeftError, EventStream, while_connected


def routes(service: Service) -> APIRouter:
    """Return the routes of one service."""
    router = APIRouter(prefix="/v1", dependencies=[needs("infer")])

    @router.post("/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one or several texts."""
        work = await service.prepare(asked_completion(body))
        return await _answered(service, request, body, work, CompletionAnswer(service, work))

    @router.post("/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        text = service.chat.render([message.plain() for message in body.messages])
        work = await service.prepare(asked_chat(body, text))
        return await _answered(service, request, body, work, ChatAnswer(service, work))

    @router.get("/models")
    async def models() -> dict[str, Any]:
        """List the one model there is."""
        return {"object": "list", "data": [_model(service)]}

    @router.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Describe the model."""
        if name != service.config.model_name:
            raise ApiError(
                404, "This service has no such model.", code="model_not_found", param="model"
            )
        return _model(service)

    return router


def asked_completion(body: CompletionRequest) -> Asked:
    """Return a completion request in the service's words."""
    return Asked(
        model=body.model,
        prompts=_prompts(body.prompt),
        params=sampling(**_common(body), max_tokens=_or(body.max_tokens, 16),
                        logprobs=body.logprobs),
        n=_or(body.n, 1),
        routing=body.routing,
        priority=_or(body.priority, 0),
    )  # fmt: skip


def asked_chat(body: ChatRequest, text: str) -> Asked:
    """Return a chat request in the service's words.

    Raises:
        ApiError: fields contradict one another.
    """
    limit = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    if body.max_completion_tokens is not None and body.max_tokens is not None:
        raise invalid("Give max_tokens or max_completion_tokens, not both.", "max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs needs logprobs: true.", "top_logprobs")
    return Asked(
        model=body.model,
        prompts=[text],
        params=sampling(**_common(body), max_tokens=getattr(body, limit),
                        logprobs=_or(body.top_logprobs, 0) if body.logprobs else None),
        n=_or(body.n, 1),
        routing=body.routing,
        priority=_or(body.priority, 0),
        fields={"prompt": "messages", "max_tokens": limit},
    )  # fmt: skip


def _common(body: CompletionRequest | ChatRequest) -> dict[str, Any]:
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if not all(stops):
        raise invalid("A stop string needs at least one character.", "stop")
    return {
        "temperature": float(_or(body.temperature, 1.0)),
        "top_p": float(_or(body.top_p, 1.0)),
        "top_k": _or(body.top_k, 0),
        "seed": body.seed,
        "stop": tuple(stops),
        "ignore_eos": bool(body.ignore_eos),
    }


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[Prompt]:
    """Return the prompts of a call; a list of numbers is one prompt."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)  # type: ignore[arg-type]


def _or(value: Any, default: Any) -> Any:
    """Return the default where a field is null, as OpenAI's service does."""
    return default if value is None else value


async def _answered(
    service: Service,
    request: Request,
    body: CompletionRequest | ChatRequest,
    work: Work,
    answer: Answer,
) -> Response:
    entry: Entry = request.state.audit
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options needs stream: true.", "stream_options")
    call = service.submit(work, entry)
    if body.stream:
        usage = body.stream_options is not None and body.stream_options.include_usage
        chunks = _chunks(service, call, entry, answer, usage=usage)
        return EventStream(chunks, request, lambda: service.leave(call))
    try:
        last = await while_connected(request.receive, service.gather(call, entry))
    except CallerLeftError:
        entry.outcome = LEFT
        return Response(status_code=499)  # nobody reads it
    finally:
        service.leave(call)
    return JSONResponse(answer.whole(last))


async def _chunks(
    service: Service, call: Call, entry: Entry, answer: Answer, *, usage: bool
) -> AsyncIterator[dict[str, Any]]:
    for chunk in answer.opening():
        yield chunk
    async for piece in service.follow(call, entry):
        yield answer.chunk(piece)
    if usage:
        yield answer.closing()


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.config.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "local",
        "max_model_len": service.engine.max_model_len,
    }
