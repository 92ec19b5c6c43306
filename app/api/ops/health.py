"""`GET /health` and `GET /ready`: probes of supervisors and load balancers, some by HEAD; no key is needed."""

from fastapi import APIRouter, Request

from app.api.serving import engine_for
from app.http.errors.rejections import Unavailable
from app.server_state import server_state

router = APIRouter()


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def check_health(request: Request) -> dict[str, str]:
    """Return 200 while the default model's engine is healthy, else 503 with the reason."""
    if (reason := (await engine_for(request, None)).unhealthy_reason) is not None:
        raise Unavailable(reason)
    return {"status": "ok"}


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def check_readiness(request: Request) -> dict[str, str]:
    """Return 200 while the model is loaded, the queue not full and no shutdown begun, else 503."""
    if (reason := server_state(request).not_ready_reason) is not None:
        raise Unavailable(reason)
    return {"status": "ready"}
