"""Runs the generation of one response: streamed, as a whole, or in the background."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

from fastapi import Request, Response
from pydantic import BaseModel

from app.api.openai.responses.items.open_items import Event
from app.api.openai.responses.items.output_items import ResponseError, ResponseObject
from app.api.openai.responses.response_writer import EncodedEvent, ResponseWriter
from app.api.serving import respond_whole, written
from app.api.sse import EventStream
from app.generation.choice import Delta
from app.generation.generation import Generation
from app.http.errors.rejections import Unavailable
from app.http.errors.responses import stream_error_report
from app.http.request_lifetime import held_by
from app.http.streams.event_log import EventLog
from app.http.streams.late_head import Opening
from app.observability.logs import summarize_exception
from app.server_state import DetachedResponse, server_state

logger = logging.getLogger(__name__)

Save = Callable[[ResponseObject, EventLog | None], Awaitable[None]]
Encode = Callable[[Sequence[Event]], Awaitable[list[EncodedEvent]]]


class ResponseRun:
    """A response and the generation that makes it, which is closed in the end.

    save: stores the response; called before the client can see that it is complete.
    """

    def __init__(self, generation: Generation, writer: ResponseWriter, save: Save) -> None:
        self._generation = generation
        self._writer = writer
        self._save = save

    def stream(self, request: Request) -> Response:
        encode = partial(self._encoded, request)
        failed = partial(self._failed, encode)
        return EventStream(self._stream(encode), self._writer.ping, failed)

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
        encode = _unread if log is None else partial(self._encoded, request)
        with server_state(request).in_flight.counting("a response in the background"):
            try:
                steps = self._written(encode, log)
                await anext(steps)
                await self._save_if_possible()
                if log is not None:
                    log.publish()
                async for _ in steps:
                    if log is not None:
                        log.publish()
            except Exception as error:
                await self._failed(encode, error, log)

    def _body(self) -> str:
        return self._writer.response.model_dump_json(exclude_unset=True)

    async def _save_if_possible(self, log: EventLog | None = None) -> None:
        """Store what is generated already: a disk that is full does not take it from its client."""
        try:
            await self._save(self._writer.response, log)
        except OSError as error:
            _log_unstored(error)

    async def _stream(self, encode: Encode) -> AsyncIterator[bytes]:
        steps = self._written(encode)
        yield Opening(b"".join(await anext(steps)))
        async for frames in steps:
            if frames:
                yield b"".join(frames)

    async def _encoded(self, request: Request, events: Sequence[Event]) -> list[EncodedEvent]:
        if self._writer.is_long(events):
            unsent = server_state(request).unsent
            encode = partial(self._writer.encode, events)
            return await unsent.write(encode, self._writer.num_bytes)
        return self._writer.encode(events)

    async def _written(
        self, encode: Encode, log: EventLog | None = None
    ) -> AsyncIterator[list[bytes]]:
        """Yield the frames of each step; the response is stored before the last ones are yielded."""
        async for events in self._steps():
            yield await self._sent(await encode(events), log)

    async def _failed(self, encode: Encode, error: Exception, log: EventLog | None = None) -> bytes:
        """Return the frames of what ended the response, which is stored as failed."""
        message = stream_error_report(error).message
        reason = ResponseError(code="server_error", message=message)
        return b"".join(await self._sent(await encode(self._writer.fail(reason)), log))

    async def _sent(self, events: Sequence[EncodedEvent], log: EventLog | None) -> list[bytes]:
        """Add events to the log, store the response if they are the last, and return their frames."""
        if log is not None:
            log.append(self._writer.frames(events))
        if self._writer.is_finished:
            try:
                await self._save_if_possible(log)
            except Exception:
                if log is not None:
                    log.drop_unpublished()
                raise
        return self._writer.sent(events)

    async def _steps(self) -> AsyncIterator[Sequence[Event]]:
        yield self._writer.begin()
        async for item in self._generation:
            assert isinstance(item, Delta), "no progress was asked for"
            yield self._writer.feed(item)
        yield self._writer.end(self._generation.summary)


async def _unread(_: Sequence[Event]) -> list[EncodedEvent]:
    return []


def _log_unstored(error: OSError) -> None:
    logger.error("a response is not stored: %s", summarize_exception(error))
