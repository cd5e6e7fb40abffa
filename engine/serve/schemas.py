"""What requests may hold, in OpenAI's words; strict, so that "5", 1.5 and true are no ids.

Fields of OpenAI's that this engine does not compute are accepted at the value that changes nothing
and refused at any other; a field nobody knows is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.runtime.admission import MAX_PRIORITY
from engine.serve.errors import ApiError, invalid

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
MAX_COUNT = 1 << 40
"""More than any limit of ours, so that the limit itself is what a refusal names."""

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "logit_bias": ({},),
    "store": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "parallel_tool_calls": (False, True),
}
"""Field -> the values, besides null, that change nothing."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Strict):
    """How a stream ends."""

    include_usage: bool = False
    include_obfuscation: bool = False


class RoutingOptions(_Strict):
    """What the field `routing` of an answer holds."""

    layers: list[Annotated[int, Field(ge=0, lt=1 << 16)]] | None = None
    """The model's numbers of MoE layers; null is all."""
    tokens: bool = True
    """Experts and weights token by token."""
    encodings: bool = False
    """All ids in the two encodings other engines use."""


class _Common(_Strict):
    model: Name
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = 1
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = 0
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = False
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = 0
    """Smaller is more urgent, as in vLLM."""
    routing: bool | RoutingOptions | None = None
    user: Annotated[str, Field(max_length=256)] | None = None
    metadata: dict[str, str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_changes_nothing(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for field, harmless in UNSUPPORTED.items():
            if field in values and field not in cls.model_fields:
                value = values[field]
                if value is not None and not any(_same(value, one) for one in harmless):
                    raise invalid(
                        f"{field} is not supported at this value.", field, "unsupported_parameter"
                    )
        return {key: value for key, value in values.items() if key not in UNSUPPORTED}


class CompletionRequest(_Common):
    """The body of `POST /v1/completions`."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    max_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class TextPart(_Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: Annotated[str, Field(max_length=256)] | None = None

    def plain(self) -> dict[str, str]:
        """Return role and text."""
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        return {"role": self.role, "content": content}


class ChatRequest(_Common):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


def refusal(problems: list[Any]) -> ApiError:
    """Turn what a validator found into one refusal that repeats nothing of the input."""
    first = problems[0] if problems else {}
    place = [part for part in first.get("loc", ()) if part != "body"]
    param = place[0] if place and place[0] in _KNOWN else None
    kind = str(first.get("type", ""))
    if kind == "json_invalid":
        return invalid("The body is not valid JSON.", None, "invalid_json")
    if kind == "extra_forbidden" and param is None:
        return invalid(
            "The body has a field this service does not know.", None, "unknown_parameter"
        )
    if kind == "missing" and param:
        return invalid(f"{param} is missing.", param, "missing_parameter")
    if param is None:
        return invalid(
            "The body must be a JSON object, sent with Content-Type: application/json.", None
        )
    return invalid(f"{param} has a value that is not allowed{_allowed(first)}.", param)


def _allowed(problem: Any) -> str:
    """Return the limit a value broke, in words; limits are ours."""
    limits = {
        name: value
        for name, value in (problem.get("ctx") or {}).items()
        if name in _LIMITS and isinstance(value, int | float)
    }
    return "".join(f": {_LIMITS[name]} {value:g}" for name, value in limits.items())


_LIMITS = {
    "ge": "it must be at least",
    "gt": "it must be above",
    "le": "it must be at most",
    "lt": "it must be below",
    "min_length": "its length must be at least",
    "max_length": "its length must be at most",
}
_ACTS = ("expert", "experts", "layer", "value", "bonus", "mode", "rank", "ranks", "point",
         "fault", "delay_ms", "lease_s", "drill", "lease")  # fmt: skip
_KNOWN = {*CompletionRequest.model_fields, *ChatRequest.model_fields, *_ACTS}


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)
