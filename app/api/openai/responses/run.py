"""Runs the generation of one response: streamed, as a whole, or in the background."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from fastapi import Request, Response
from pydantic import BaseModel

from app.api.openai.responses.items.open_items import Event
from app.api.openai.responses.items.output_items import ResponseError, ResponseObject
from app.api.openai.responses.response_writer import ResponseWriter
from app.api.serving import respond_whole, written
from app.api.sse import EventStream
from app.generation.choice import Delta
from app.generation.generation import Generation
from app.http.errors.rejections import Unavailable
from app.http.errors.responses import stream_error_report
from app.http.request_lifetime import held_by
from app.http.streams.event_log import EventLog
from app.observability.logs import summarize_exception
from app.server_state import DetachedResponse, server_state

logger = logging.getLogger(__name__)

T = TypeVar("T")
Save = Callable[[ResponseObject, EventLog | None], Awaitable[None]]


class ResponseRun:
    """A response and the generation that makes it, which is closed in the end.

    save: stores the response; called before the client can see that it is complete.
    """

    def __init__(self, generation: Generation, writer: ResponseWriter, save: Save) -> None:
        self._generation = generation
        self._writer = writer
        self._save = save

    def stream(self, request: Request) -> Response:
        return EventStream(self._stream(request), self._writer.ping)

    async def whole(
        self, request: Request, form: Callable[[ResponseObject], BaseModel] | None = None
    ) -> Response:
        """Return the response when it is complete, or what `form` makes of it.

        Raises:
            EngineError: the engine failed.
        """

        def body() -> str:
            response = self._writer.response
            shown = response if form is None else form(response)
            return shown.model_dump_json(exclude_unset=True)

        async def complete() -> bytes:
            async for _ in self._steps():
                pass
            await self._save_if_possible()
            # It may take a while until there is room for the response.
            self._generation.close()
            return await written(request, body, self._writer.num_bytes)

        return await respond_whole(self._generation, complete)

    async def detached(self, request: Request, *, is_streamed: bool) -> Response:
        """Generate the response in the background; return it as it is queued, or its events.

        Raises:
            Unavailable: the response cannot be stored.
        """
        try:
            await self._save(self._writer.response, None)
        except OSError as error:
            _log_unstored(error)
            raise Unavailable("responses cannot be stored at present") from None
        body = self._body()
        state, response_id = server_state(request), self._writer.response.id
        log = EventLog() if is_streamed else None
        task = asyncio.create_task(self._run(request, log))
        state.detached[response_id] = DetachedResponse(task, log)
        # Now the task holds what the request held; also one that is cancelled before it begins.
        held = held_by(request).pop_all()
        held.callback(state.detached.pop, response_id)
        if log is not None:
            held.callback(log.close)
        task.add_done_callback(lambda _: held.close())
        if log is None:
            return Response(body, media_type="application/json")
        return EventStream(log.follow())

    async def _run(self, request: Request, log: EventLog | None) -> None:
        """Generate to the end; the store has what becomes of it, and the log its events."""

        async def write(events: Sequence[Event]) -> None:
            if log is not None:
                log.append(await self._frames(request, events))

        with server_state(request).in_flight.counting("a response in the background"):
            steps = self._written(write, log)
            await anext(steps)
            await self._save_if_possible()
            if log is not None:
                log.publish()
            async for _ in steps:
                if log is not None:
                    log.publish()

    def _body(self) -> str:
        return self._writer.response.model_dump_json(exclude_unset=True)

    async def _save_if_possible(self, log: EventLog | None = None) -> None:
        """Store what is generated already: a disk that is full does not take it from its client."""
        try:
            await self._save(self._writer.response, log)
        except OSError as error:
            _log_unstored(error)

    async def _stream(self, request: Request) -> AsyncIterator[bytes]:
        async for frames in self._written(partial(self._frames, request)):
            if frames:
                yield b"".join(frames)

    async def _frames(self, request: Request, events: Sequence[Event]) -> list[bytes]:
        if self._writer.is_long(events):
            unsent = server_state(request).unsent
            encode = partial(self._writer.encode, events)
            return self._writer.frames(await unsent.write(encode, self._writer.num_bytes))
        return self._writer.frames(self._writer.encode(events))

    async def _written(
        self, write: Callable[[Sequence[Event]], Awaitable[T]], log: EventLog | None = None
    ) -> AsyncIterator[T]:
        """Write the events of each step, or of the error that ended them.

        The response is stored before the last ones are yielded.
        """
        try:
            async for events in self._steps():
                done = await write(events)
                if self._writer.is_finished:
                    await self._save_if_possible(log)
                yield done
        except Exception as error:
            message = stream_error_report(error).message
            reason = ResponseError(code="server_error", message=message)
            done = await write(self._writer.fail(reason))
            await self._save_if_possible(log)
            yield done

    async def _steps(self) -> AsyncIterator[Sequence[Event]]:
        yield self._writer.begin()
        async for item in self._generation:
            assert isinstance(item, Delta), "no progress was asked for"
            yield self._writer.feed(item)
        yield self._writer.end(self._generation.summary)


def _log_unstored(error: OSError) -> None:
    logger.error("a response is not stored: %s", summarize_exception(error))
