"""`GET /health`."""

from fastapi import APIRouter, Request

from app.endpoints.serving import engine_for
from batching import EngineStopped

router = APIRouter()


@router.get("/health")
async def check_health(request: Request) -> dict[str, str]:
    """Say ok while the default model's engine can answer, and 503 after."""
    if not (await engine_for(request, None)).is_alive:
        raise EngineStopped
    return {"status": "ok"}
