"""`GET /health` and `GET /ready`: what a supervisor and a load balancer ask; no key is needed."""

from fastapi import APIRouter, Request

from app.api.serving import engine_for
from app.http.rejections import Unavailable
from app.server_state import server_state

router = APIRouter()


@router.get("/health")
async def check_health(request: Request) -> dict[str, str]:
    """Say ok while the default model's engine can answer, and 503 when it cannot."""
    if (trouble := (await engine_for(request, None)).trouble) is not None:
        raise Unavailable(trouble)
    return {"status": "ok"}


@router.get("/ready")
async def check_readiness(request: Request) -> dict[str, str]:
    """Say ready while new requests are welcome: loaded, not shutting down, the queue not full."""
    if (reason := server_state(request).unreadiness) is not None:
        raise Unavailable(reason)
    return {"status": "ready"}
