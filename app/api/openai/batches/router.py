"""`/v1/batches`: requests in a file, which are served when nothing else is."""

import secrets
from dataclasses import replace
from functools import partial
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request

from app.api.openai.batches.schemas import BatchList, BatchObject, BatchRequest
from app.api.openai.files.router import own_file
from app.api.schemas.errors import ERROR_RESPONSES
from app.api.serving import client_of
from app.http.errors.rejections import FilesTooLarge, NotFound, QuotaExceeded
from app.http.json_body import JsonRoute
from app.server_state import server_state
from app.storage.batches import StoredBatch
from app.storage.disk.in_thread import in_thread
from app.storage.disk.quota import NoRoomForFile
from batching import InvalidRequest

router = APIRouter(route_class=JsonRoute, prefix="/v1/batches", responses=ERROR_RESPONSES)

# The limit is for each key.
_MAX_UNFINISHED: Final = 256
_RETRY_AFTER: Final = 60


@router.post("")
async def create_batch(body: BatchRequest, request: Request) -> BatchObject:
    """Begin to serve the requests of a file."""
    state = server_state(request)
    batches = state.storage.batch.batches
    if body.endpoint not in state.batch_endpoints:
        known = ", ".join(state.batch_endpoints)
        raise InvalidRequest("endpoint", f"it must be one of {known}")
    file = await own_file(request, body.input_file_id)
    if file.purpose != "batch":
        raise InvalidRequest("input_file_id", f"the purpose of the file is '{file.purpose}'")
    if await in_thread(lambda: batches.num_unfinished(file.owner)) >= _MAX_UNFINISHED:
        what = f"this API key has {_MAX_UNFINISHED} unfinished batches, its limit"
        raise QuotaExceeded(what, _RETRY_AFTER)
    try:
        await in_thread(state.storage.batch.files.account(file.owner).check)
    except NoRoomForFile as error:
        raise FilesTooLarge(str(error)) from None
    created = int(state.storage.batch.clock())
    batch = StoredBatch(
        id=f"batch_{secrets.token_hex(16)}",
        owner=file.owner,
        endpoint=body.endpoint,
        input_file_id=file.id,
        completion_window=body.completion_window,
        created=created,
        expires=created + body.window_seconds,
        metadata=body.metadata,
        output_ttl=None if (ttl := body.output_expires_after) is None else ttl.seconds,
    )
    if not await in_thread(partial(batches.add, batch)):
        raise NotFound(f"No such File object: {file.id}")
    state.batches.wake()
    return BatchObject.of(batch, None)


@router.get("")
async def list_batches(
    request: Request, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> BatchList:
    """List the client's batches, the newest first."""
    state = server_state(request)
    owner, batches = client_of(request).key_digest, state.storage.batch.batches
    if after is not None and await in_thread(partial(batches.get, owner, after)) is None:
        raise InvalidRequest("after", "there is no batch with this id")
    page = await in_thread(partial(batches.page, owner, after=after, limit=limit))
    data = [BatchObject.of(batch, state.batches.counts(batch.id)) for batch in page.items]
    return BatchList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=page.has_more,
    )


@router.get("/{batch_id}")
async def get_batch(batch_id: str, request: Request) -> BatchObject:
    """Describe a batch, finished or not."""
    batch = await _own_batch(request, batch_id)
    return BatchObject.of(batch, server_state(request).batches.counts(batch_id))


@router.post("/{batch_id}/cancel")
async def cancel_batch(batch_id: str, request: Request) -> BatchObject:
    """Stop a batch; what it has done so far is in its files."""
    state = server_state(request)
    if (batch := await _own_batch(request, batch_id)).is_finished:
        raise InvalidRequest("batch_id", f"Cannot cancel a batch with status '{batch.status}'.")
    now = int(state.storage.batch.clock())

    def cancelled(batch: StoredBatch) -> StoredBatch | None:
        if batch.status not in ("validating", "in_progress"):
            return None
        return replace(batch, status="cancelling", times={**batch.times, "cancelling": now})

    batch = await in_thread(partial(state.storage.batch.batches.change, batch_id, cancelled))
    state.batches.wake()
    return BatchObject.of(batch, state.batches.counts(batch_id))


async def _own_batch(request: Request, batch_id: str) -> StoredBatch:
    """Return a batch of the client.

    Raises:
        NotFound: the client has none with this id.
    """
    batches = server_state(request).storage.batch.batches
    batch = await in_thread(partial(batches.get, client_of(request).key_digest, batch_id))
    if batch is None:
        raise NotFound(f"No batch found with id '{batch_id}'.")
    return batch
