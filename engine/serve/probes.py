"""The open routes: whether the process lives, and whether it can serve."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse

from engine.serve.service import Service


def routes(service: Service) -> APIRouter:
    """Return `/healthz` and `/readyz`."""
    router = APIRouter()

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Say that the process answers."""
        return {"status": "alive"}

    @router.get("/readyz")
    async def readyz() -> JSONResponse:
        """Say whether a request would be served now, and if not, why."""
        reason = service.reason()
        status = "ready" if reason is None else "not ready"
        return JSONResponse({"status": status, "reason": reason}, 200 if reason is None else 503)

    return router
