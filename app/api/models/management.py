"""`POST /models/load` and `/models/unload`, and `GET /models/sse`: as llama.cpp's router has them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Final

from fastapi import APIRouter, Request

from app.api.models.cards import status_object
from app.api.models.schemas import Accepted, ModelName
from app.api.schemas.errors import ERROR_RESPONSES
from app.api.serving import check_admin, client_of, measured
from app.api.sse import EventStream
from app.http.errors.rejections import Unavailable
from app.http.json_body import JsonRoute
from app.http.request_lifetime import held_by
from app.server_state import server_state
from batching import ModelState, SchedulerManager

# Seconds between two looks at the progress of a load.
INTERVAL: Final = 0.25
MAX_LISTENERS: Final = 16

router = APIRouter(route_class=JsonRoute, responses=ERROR_RESPONSES)


@router.post("/models/load")
async def load_model(body: ModelName, request: Request) -> Accepted:
    """Load a model, or keep it loaded; the response does not wait for that.

    Raises:
        Forbidden: the key is not one of an admin.
        ModelNotFound, ModelTooLarge: it can never be loaded.
    """
    check_admin(request)
    await measured(request, body.model)
    lease = server_state(request).manager.request(body.model)
    # What is refused at once is the client's fault, or that of the last load.
    if lease.future.done():
        lease.future.result()
    lease.future.add_done_callback(lambda _: lease.close())
    return Accepted()


@router.post("/models/unload")
async def unload_model(body: ModelName, request: Request) -> Accepted:
    """Unload a model when its requests have ended; the response does not wait for that.

    Raises:
        Forbidden: the key is not one of an admin.
        ModelNotFound: there is no such model.
        RequestError: it is divided among ranks.
    """
    check_admin(request)
    server_state(request).manager.unload(body.model)
    return Accepted()


# Not in the schema: the response has no end.
@router.get("/models/sse", include_in_schema=False)
async def watch_models(request: Request) -> EventStream:
    """Send the state of each model, and then every change of one."""
    service = server_state(request)
    if len(service.model_watchers) >= MAX_LISTENERS:
        raise Unavailable(f"{MAX_LISTENERS} clients watch already")
    changes = ModelChanges(service.manager, is_admin=client_of(request).is_admin)
    service.model_watchers.add(changes)
    held = held_by(request)
    held.callback(changes.close)
    held.callback(service.model_watchers.discard, changes)
    return EventStream(changes.events())


class ModelChanges:
    """The changes of the models' states, for one client."""

    def __init__(self, manager: SchedulerManager, *, is_admin: bool) -> None:
        self._manager, self._is_admin = manager, is_admin
        self._changed = asyncio.Event()
        self._sent: dict[str, bytes] = {}
        loop = asyncio.get_running_loop()

        def notify() -> None:
            with suppress(RuntimeError):  # the loop has been closed meanwhile
                loop.call_soon_threadsafe(self._changed.set)

        self._end: Callable[[], None] | None = manager.listeners.add(notify)

    def close(self) -> None:
        """Listen no more; may be called repeatedly."""
        end, self._end = self._end, None
        if end is not None:
            end()

    async def events(self) -> AsyncIterator[bytes]:
        """Yield an event for each model, and for each change, until the server shuts down."""
        while not self._manager.is_closed:
            self._changed.clear()
            is_loading = False
            for status in self._manager.statuses():
                is_loading |= status.state is ModelState.LOADING
                found = status_object(status, is_admin=self._is_admin)
                frame = {"model": status.model_id} | found.model_dump(exclude_none=True)
                event = b"data: " + json.dumps(frame).encode() + b"\n\n"
                if self._sent.get(status.model_id) != event:
                    self._sent[status.model_id] = event
                    yield event
            with suppress(TimeoutError):
                async with asyncio.timeout(INTERVAL if is_loading else None):
                    await self._changed.wait()
