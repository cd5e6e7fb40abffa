"""The HTTP application: which routes there are, and what is said when one fails."""

from __future__ import annotations

import logging

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from engine.serve import control, errors, observe, openai, probes, schemas
from engine.serve.errors import ApiError
from engine.serve.gate import Gate
from engine.serve.guard import Guard
from engine.serve.service import Service

log = logging.getLogger("engine.serve")


def application(service: Service, gate: Gate) -> ASGIApp:
    """Return the guarded application of one service."""
    app = FastAPI(
        title="TokenRouter Workbench",
        # The pages for people load scripts from elsewhere; the description itself stays.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.include_router(probes.routes(service))
    app.include_router(openai.routes(service))
    app.include_router(observe.routes(service))
    app.include_router(control.routes(service))
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(RequestValidationError, _not_valid)
    app.add_exception_handler(HTTPException, _plain)
    app.add_exception_handler(Exception, _failed)
    return Guard(app, gate)


async def _refused(connection: HTTPConnection, refusal: Exception) -> Response:
    assert isinstance(refusal, ApiError)
    connection.state.audit.detail = refusal.code
    return JSONResponse(refusal.body, refusal.status, refusal.headers)


async def _not_valid(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, RequestValidationError)
    return await _refused(request, schemas.refusal(list(problem.errors())))


async def _plain(request: Request, problem: Exception) -> Response:
    """Put the framework's own refusals into our words."""
    assert isinstance(problem, HTTPException)
    if problem.status_code == 405:
        refusal = ApiError(405, "This address takes another method.", code="method_not_allowed")
    elif problem.status_code == 404:
        refusal = errors.not_found()
    else:
        refusal = errors.invalid("The body is not what this service takes.", None, "invalid_body")
    answer = await _refused(request, refusal)
    answer.headers.update(problem.headers or {})
    return answer


async def _failed(request: Request, failure: Exception) -> Response:
    """Answer for a fault of our own; its text stays in the log."""
    log.error("a request failed inside the service", exc_info=failure)
    return await _refused(
        request, ApiError(500, "The service failed at this request.", code="internal_error")
    )
