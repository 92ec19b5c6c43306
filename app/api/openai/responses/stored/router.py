"""`/v1/responses/{response_id}`: stored responses."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal

import anyio
from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel

from app.api.openai.responses.items.item_list import ItemList
from app.api.openai.responses.items.output_items import ResponseError, ResponseObject
from app.api.openai.responses.stored.inputs import StoredInput, stored_items
from app.api.openai.responses.stored.own import OwnResponses
from app.api.schemas.errors import ERROR_RESPONSES
from app.api.schemas.fields import INT32_MAX
from app.api.serving import prepared, written
from app.api.sse import EventStream
from app.server_state import DetachedResponse, server_state
from batching import InvalidRequest

router = APIRouter(prefix="/v1/responses/{response_id}", responses=ERROR_RESPONSES)

_LOST: Final = "the server ended while it generated this response"


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


@router.get("", response_model=ResponseObject)
async def retrieve_response(
    response_id: str,
    request: Request,
    stream: Annotated[bool, Query()] = False,
    starting_after: Annotated[int | None, Query(ge=0, le=INT32_MAX)] = None,
) -> Response:
    """Return a stored response, finished or not, or the events of one that was streamed in the background."""
    if stream:
        start = 0 if starting_after is None else starting_after + 1
        return await _followed(request, response_id, start)
    if starting_after is not None:
        raise InvalidRequest("starting_after", "this needs stream=true")
    return await _current(request, response_id)


@router.delete("", response_model=DeletedResponse)
async def delete_response(response_id: str, request: Request) -> DeletedResponse:
    """Delete a stored response; one that is being generated ends."""
    own = OwnResponses(request)
    await own.get(response_id)
    with anyio.CancelScope(shield=True):
        await _stop(request, response_id)
        await own.delete(response_id)
    return DeletedResponse(id=response_id)


@router.post("/cancel", response_model=ResponseObject)
async def cancel_response(response_id: str, request: Request) -> Response:
    """End a response that is generated in the background; a finished one stays as it is."""
    own = OwnResponses(request)
    stored = await own.get(response_id)
    # One that is complete may be long.
    response = await prepared(request, partial(json.loads, stored.body))
    if not response["background"]:
        raise InvalidRequest("response_id", "Cannot cancel a synchronous response.")
    # A response that is ended is stored as cancelled, even if the client leaves meanwhile.
    with anyio.CancelScope(shield=True):
        if (stopped := await _stop(request, response_id)) is not None:
            stored = await own.get(response_id)
            if not stored.is_finished:
                response = ResponseObject.model_validate_json(stored.body)
                response.status = "cancelled"
                given = partial(StoredInput, stored.input, stored.images)
                await own.put(response, stopped.events, input_items=given)
    return await _current(request, response_id)


@router.get("/input_items", response_model=ItemList)
async def list_input_items(
    response_id: str,
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """List the items that a stored response responds to, the last one first."""
    own = OwnResponses(request)

    def page() -> str:
        items = stored_items(own.read(response_id))
        rest = _after(items if order == "asc" else items[::-1], after)
        page = rest[:limit]
        return ItemList.of(page, has_more=len(rest) > limit).model_dump_json()

    return Response(await written(request, page), media_type="application/json")


def _after(items: Sequence[dict[str, Any]], after: str | None) -> Sequence[dict[str, Any]]:
    if after is None:
        return items
    for index, item in enumerate(items):
        if item["id"] == after:
            return items[index + 1 :]
    raise InvalidRequest("after", "there is no item with this id")


async def _followed(request: Request, response_id: str, start: int) -> Response:
    """Return the events of a response from a number on.

    Raises:
        NotFound: the client has none with this id.
        InvalidRequest: it was not made with `background` and `stream`.
    """
    # Looked up first: work that ends while the response is read is not lost.
    work = server_state(request).detached.get(response_id)
    own = OwnResponses(request)
    stored = await own.get(response_id)
    log = await own.events(response_id) if work is None else work.events
    if log is not None:
        return EventStream(log.follow(start))
    if work is None and not stored.is_finished:
        return EventStream(_lost_events(stored.body, start))
    raise InvalidRequest("stream", "this response was not made with background and stream")


async def _lost_events(body: str, number: int) -> AsyncIterator[bytes]:
    """Yield the last event of a response that was lost with its server."""
    response = _lost_response(body).model_dump(mode="json", exclude_unset=True)
    name = "response.failed"
    event = {"type": name, "sequence_number": number, "response": response}
    yield f"event: {name}\ndata: {json.dumps(event)}\n\n".encode()


def _lost_response(body: str) -> ResponseObject:
    response = ResponseObject.model_validate_json(body)
    response.status = "failed"
    response.error = ResponseError(code="server_error", message=_LOST)
    return response


async def _current(request: Request, response_id: str) -> Response:
    """Return a response; an unfinished one that nothing works on was lost with its server.

    Raises:
        NotFound: the client has none with this id.
    """
    # Looked up first: work that ends while the response is read has not lost it.
    is_worked_on = response_id in server_state(request).detached
    own = OwnResponses(request)

    def read() -> str:
        stored = own.read(response_id)
        if stored.is_finished or is_worked_on:
            return stored.body
        return _lost_response(stored.body).model_dump_json(exclude_unset=True)

    return Response(await written(request, read), media_type="application/json")


async def _stop(request: Request, response_id: str) -> DetachedResponse | None:
    """End the work on a response, wait for that and return it; None if there is none."""
    if (work := server_state(request).detached.get(response_id)) is not None:
        work.task.cancel()
        await asyncio.wait([work.task])
    return work
