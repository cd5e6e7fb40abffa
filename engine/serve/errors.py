"""What a caller is told when something is refused: fixed texts in the shape OpenAI's errors have.

Texts name our limits and the parameter's name, never what the caller sent. Detail goes to the audit
log.
"""

from __future__ import annotations

from typing import Any

import grpc

INVALID, AUTH, PERMISSION = "invalid_request_error", "authentication_error", "permission_error"
MISSING, RATE, SERVER = "not_found_error", "rate_limit_error", "server_error"

_KINDS = {401: AUTH, 403: PERMISSION, 404: MISSING, 429: RATE}


class ApiError(Exception):
    """A refusal with its HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> str:
        """OpenAI's word for this kind of error."""
        return _KINDS.get(self.status, INVALID if self.status < 500 else SERVER)

    @property
    def body(self) -> dict[str, Any]:
        """The answer's body."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        """Headers that belong to it."""
        found = {}
        if self.retry_after_s is not None:
            found["Retry-After"] = str(self.retry_after_s)
        if self.status == 401:
            found["WWW-Authenticate"] = "Bearer"
        return found

    @property
    def grpc_code(self) -> grpc.StatusCode:
        """The same refusal in gRPC's words."""
        return _GRPC.get(self.status, grpc.StatusCode.INTERNAL)


_GRPC = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}


def invalid(message: str, param: str | None, code: str = "invalid_value") -> ApiError:
    """Return a 400 about one parameter."""
    return ApiError(400, message, code=code, param=param)


def draining() -> ApiError:
    """Return what new requests get while running ones end."""
    return ApiError(
        503, "The service is ending; send this to another one.", code="draining", retry_after_s=5
    )


def broken() -> ApiError:
    """Return what a request gets when the engine failed under it."""
    return ApiError(500, "The engine failed; the request was given up.", code="engine_error")


def dead() -> ApiError:
    """Return what requests get when the engine runs no more."""
    return ApiError(
        503, "The engine has stopped; the service must be restarted.", code="engine_dead"
    )


def overloaded(limit: int) -> ApiError:
    """Return what a request gets when too many wait already."""
    return ApiError(
        429, f"{limit} requests wait already; try again later.", code="queue_full", retry_after_s=1
    )


def too_fast(per_minute: int) -> ApiError:
    """Return what a caller gets that calls too often."""
    return ApiError(
        429,
        f"More than {per_minute} calls in a minute; slow down.",
        code="rate_limited",
        retry_after_s=5,
    )


def unauthorized() -> ApiError:
    """Return what a caller without a good key gets."""
    return ApiError(
        401, "A valid key is needed: Authorization: Bearer KEY.", code="invalid_api_key"
    )


def forbidden(scope: str) -> ApiError:
    """Return what a caller gets whose key does not reach so far."""
    return ApiError(403, f"This key lacks the scope {scope}.", code="missing_scope")


def not_found() -> ApiError:
    """Return the answer for a path that is none."""
    return ApiError(404, "There is nothing at this address.", code="not_found")


def body_too_large(limit: int) -> ApiError:
    """Return what a body above the limit gets."""
    return ApiError(413, f"The request is larger than {limit} bytes.", code="body_too_large")
