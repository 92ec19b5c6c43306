"""`GET /health` and `GET /ready`: probes of supervisors and load balancers, some by HEAD; no key is needed."""

from fastapi import APIRouter, Request

from app.api.schemas.errors import ERROR_RESPONSES
from app.http.errors.rejections import Unavailable
from app.server_state import server_state
from batching import ModelState

router = APIRouter(responses=ERROR_RESPONSES)


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def check_health(request: Request) -> dict[str, str | list[str]]:
    """Return 200 while the engines of all loaded models are healthy, else 503 with the reason.

    `failed_models` are those whose last load has failed; the others are served.
    """
    service = server_state(request)
    if (reason := service.unhealthy_reason) is not None:
        raise Unavailable(reason)
    statuses = service.manager.statuses()
    failed = [s.model_id for s in statuses if s.state is ModelState.FAILED]
    return {"status": "ok", "failed_models": failed} if failed else {"status": "ok"}


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def check_readiness(request: Request) -> dict[str, str]:
    """Return 200 while the server is healthy, the queue not full and no shutdown begun, else 503."""
    if (reason := server_state(request).not_ready_reason) is not None:
        raise Unavailable(reason)
    return {"status": "ready"}
