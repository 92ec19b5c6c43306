"""`GET /server/events`: the engine's state, about four times a second."""

from typing import Final

from fastapi import APIRouter, Request

from app.api.schemas.errors import ERROR_RESPONSES
from app.api.serving import client_of
from app.api.sse import EventStream
from app.http.errors.rejections import Forbidden, Unavailable
from app.http.request_lifetime import held_by
from app.server_state import server_state
from app.settings import env_name

MAX_WATCHERS: Final = 16

router = APIRouter(responses=ERROR_RESPONSES)


# Not in the schema: the response has no end.
@router.get("/server/events", include_in_schema=False)
async def watch(request: Request, model: str | None = None) -> EventStream:
    """Send snapshots of a model's engine until the client leaves, or the model; there is no text in them.

    Raises:
        Forbidden: the key is not one of an admin.
        Unavailable: the model is not loaded, which watching does not change, or too many watch already.
    """
    if not client_of(request).is_admin:
        raise Forbidden(f"this needs a key of {env_name('admin_keys')}")
    state = server_state(request)
    name = state.manager.resolve(model or state.manager.model_ids[0])
    if (engine := state.manager.loaded(name)) is None:
        raise Unavailable(f"the model '{name}' is not loaded")
    room = state.machine_room
    if room.num_watchers >= MAX_WATCHERS:
        raise Unavailable(f"{MAX_WATCHERS} clients watch already")
    watcher = room.watch(engine)
    held_by(request).callback(watcher.close)
    return EventStream(watcher.frames())
