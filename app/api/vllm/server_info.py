"""`GET /version`, `/load` and `/kv_event_sources`, which balancers and tools of vLLM ask."""

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


class KVEventSource(BaseModel):
    """Where the events of the prefix cache are published, with vLLM's names.

    `buffer_steps` is how many messages are kept for `replay_endpoint`, `hwm` how many a slow subscriber may be behind.
    """

    publisher: str
    enable_kv_cache_events: bool
    endpoint: str
    replay_endpoint: str | None
    buffer_steps: int
    hwm: int
    topic: str


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


@router.get("/kv_event_sources")
async def get_kv_event_sources(request: Request) -> dict[str, KVEventSource]:
    """Return where events of the prefix cache are published, by rank; nothing if they are not."""
    source = server_state(request).kv_events
    return {} if source is None else {"0": KVEventSource.model_validate(source)}
