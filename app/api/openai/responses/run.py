"""Runs the generation of one response: streamed, as a whole, or in the background."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from fastapi import Request, Response

from app.api.openai.responses.open_items import Event
from app.api.openai.responses.output_items import ResponseError, ResponseObject
from app.api.openai.responses.response_writer import EncodedEvent, ResponseWriter
from app.api.serving import respond_whole, written
from app.api.sse import EventStream
from app.generation.choice import Delta
from app.generation.generation import Generation
from app.http.errors.rejections import Unavailable
from app.http.errors.responses import stream_error_report
from app.http.request_context import InFlightRequests
from app.http.request_lifetime import held_by
from app.observability.logs import summarize_exception
from app.server_state import server_state

logger = logging.getLogger(__name__)

T = TypeVar("T")
Save = Callable[[ResponseObject], Awaitable[None]]


class ResponseRun:
    """A response and the generation that makes it, which is closed in the end.

    save: stores the response; called before the client can see that it is complete.
    """

    def __init__(self, generation: Generation, writer: ResponseWriter, save: Save) -> None:
        self._generation = generation
        self._writer = writer
        self._save = save

    def stream(self, request: Request) -> Response:
        return EventStream(self._frames(request), self._writer.ping)

    async def whole(self, request: Request) -> Response:
        """Return the response when it is complete.

        Raises:
            EngineError: the engine failed.
        """

        async def complete() -> bytes:
            async for _ in self._steps():
                pass
            # It may take a while until there is room for the response.
            self._generation.close()
            return await written(request, self._body, self._writer.num_bytes)

        return await respond_whole(self._generation, complete)

    async def detached(self, request: Request) -> Response:
        """Return the queued response, and generate it in the background.

        Raises:
            Unavailable: the response cannot be stored.
        """
        try:
            await self._save(self._writer.response)
        except OSError as error:
            _log_unstored(error)
            raise Unavailable("responses cannot be stored at present") from None
        body = self._body()
        state, response_id = server_state(request), self._writer.response.id
        task = asyncio.create_task(self._run(state.in_flight))
        state.detached[response_id] = task
        # Now the task holds what the request held; also one that is cancelled before it begins.
        held = held_by(request).pop_all()
        held.callback(state.detached.pop, response_id)
        task.add_done_callback(lambda _: held.close())
        return Response(body, media_type="application/json")

    async def _run(self, in_flight: InFlightRequests) -> None:
        """Generate to the end; the store has what becomes of it."""
        with in_flight.counting("a response in the background"):
            steps = self._written(_ignore)
            await anext(steps)
            await self._save_if_possible()
            async for _ in steps:
                pass

    def _body(self) -> str:
        return self._writer.response.model_dump_json(exclude_unset=True)

    async def _save_if_possible(self) -> None:
        """Store what is generated already: a disk that is full does not take it from its client."""
        try:
            await self._save(self._writer.response)
        except OSError as error:
            _log_unstored(error)

    async def _frames(self, request: Request) -> AsyncIterator[bytes]:
        async def encode(events: Sequence[Event]) -> Sequence[EncodedEvent]:
            if not self._writer.is_long(events):
                return self._writer.encode(events)
            unsent = server_state(request).unsent
            return await unsent.write(partial(self._writer.encode, events), self._writer.num_bytes)

        async for events in self._written(encode):
            if events:
                yield self._writer.frames(events)

    async def _written(self, write: Callable[[Sequence[Event]], Awaitable[T]]) -> AsyncIterator[T]:
        """Write the events of each step, or of the error that ended them."""
        try:
            async for events in self._steps():
                yield await write(events)
        except Exception as error:
            message = stream_error_report(error).message
            reason = ResponseError(code="server_error", message=message)
            failed = self._writer.fail(reason)
            await self._save_if_possible()
            yield await write(failed)

    async def _steps(self) -> AsyncIterator[Sequence[Event]]:
        yield self._writer.begin()
        async for item in self._generation:
            assert isinstance(item, Delta), "no progress was asked for"
            yield self._writer.feed(item)
        last = self._writer.end(self._generation.summary)
        await self._save_if_possible()
        yield last


async def _ignore(events: Sequence[Event]) -> None:
    """Write nothing."""


def _log_unstored(error: OSError) -> None:
    logger.error("a response is not stored: %s", summarize_exception(error))
