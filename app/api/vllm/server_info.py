"""`GET /version` and `GET /load`, which balancers and tools of vLLM ask."""

from fastapi import APIRouter, Request
from pydantic import BaseModel

from app import __version__
from app.api.schemas.errors import ERROR_RESPONSES
from app.server_state import server_state

router = APIRouter(responses=ERROR_RESPONSES)


class ServerVersion(BaseModel):
    version: str


class ServerLoad(BaseModel):
    """How many requests are in flight, waiting ones included."""

    server_load: int


@router.head("/version", include_in_schema=False)
@router.get("/version")
async def get_version() -> ServerVersion:
    """Return the version of this server."""
    return ServerVersion(version=__version__)


@router.head("/load", include_in_schema=False)
@router.get("/load")
async def get_load(request: Request) -> ServerLoad:
    """Return how much the server has to do."""
    return ServerLoad(server_load=server_state(request).admission.num_requests)
