"""gRPC's requests in the service's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.serve.chat import ChatFormat
from engine.serve.errors import invalid
from engine.serve.proto import router_pb2 as pb
from engine.serve.schemas import RoutingOptions
from engine.serve.service import Asked, Prompt, sampling

ROLES = ("system", "developer", "user", "assistant")
DEFAULT_TOKENS = 16
"""New tokens of a completion that names no number, as over HTTP."""
FIELDS = {"prompt": "prompts", "n": "sampling.n", "stop": "sampling.stop",
          "max_tokens": "sampling.max_tokens", "priority": "sampling.priority"}  # fmt: skip


def asked_completion(request: pb.CompletionRequest) -> Asked:
    """Translate a completion request.

    Raises:
        ApiError: a prompt is neither text nor tokens.
    """
    prompts: list[Prompt] = []
    for prompt in request.prompts:
        kind = prompt.WhichOneof("kind")
        if kind is None:
            raise invalid("A prompt must have text or tokens.", "prompts", "empty_prompt")
        prompts.append(prompt.text if kind == "text" else list(prompt.tokens.ids))
    return _asked(request, prompts, DEFAULT_TOKENS)


def asked_chat(request: pb.ChatRequest, chat: ChatFormat) -> Asked:
    """Translate a chat request.

    Raises:
        ApiError: a role is unknown, or the model's template refuses the messages.
    """
    messages = [{"role": one.role, "content": one.content} for one in request.messages]
    if not messages or not all(message["role"] in ROLES for message in messages):
        raise invalid(f"messages need roles of {', '.join(ROLES)}.", "messages")
    return _asked(request, [chat.render(messages)], None)


def _asked(request: Any, prompts: Sequence[Prompt], default_tokens: int | None) -> Asked:
    wish = request.sampling

    def given(name: str, default: Any) -> Any:
        return getattr(wish, name) if wish.HasField(name) else default

    routing = None
    if request.HasField("routing"):
        layers = list(request.routing.layers)
        if not all(layer >= 0 for layer in layers):
            raise invalid("routing.layers must be numbers of layers.", "routing")
        routing = RoutingOptions(
            layers=layers or None,
            tokens=request.routing.tokens,
            encodings=request.routing.encodings,
        )
    return Asked(
        model=request.model,
        prompts=prompts,
        params=sampling(
            "sampling",
            max_tokens=given("max_tokens", default_tokens),
            temperature=given("temperature", 1.0),
            top_p=given("top_p", 1.0),
            top_k=wish.top_k,
            seed=given("seed", None),
            stop=tuple(wish.stop),
            logprobs=given("logprobs", None),
            ignore_eos=wish.ignore_eos,
        ),
        n=wish.n or 1,
        routing=routing,
        priority=wish.priority,
        label="grpc",
        fields=FIELDS,
    )
