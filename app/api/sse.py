"""Server-sent events: the bytes of a stream, and the end of it in every case."""

import logging
from collections.abc import AsyncIterator
from typing import Final

from pydantic import BaseModel
from sse_starlette import EventSourceResponse
from sse_starlette.sse import AppStatus
from starlette.types import Receive, Scope, Send

from app.api.response_builder import ResponseBuilder
from app.generation.generation import Generation, Progress
from app.http.errors import error_body
from app.observability.logs import summarize_exception
from batching import EngineError

logger = logging.getLogger(__name__)

# Seconds.  Proxies and clients give up on a connection that is silent while a request waits.
PING_INTERVAL: Final = 10

DONE: Final = b"data: [DONE]\n\n"

# sse-starlette cuts every running stream as soon as the process is told to stop; here they get
# time to finish (app/server/uvicorn_server.py).
AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]


class EventStream(EventSourceResponse):
    """Streams one generation, and closes it whatever becomes of the response.

    Not by a `finally` among the events nor by a background task: a client that goes before
    the first event leaves a generator that never started and so runs no `finally`, and a
    response that is cancelled runs no background task.
    """

    def __init__(self, generation: Generation, reply: ResponseBuilder) -> None:
        super().__init__(events(generation, reply), sep="\n", ping=PING_INTERVAL)
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()


async def events(generation: Generation, reply: ResponseBuilder) -> AsyncIterator[bytes]:
    """Yield the chunks, or what failed, and the terminator."""
    try:
        for chunk in reply.opening(generation.num_choices):
            yield _event(chunk)
        async for item in generation:
            if isinstance(item, Progress):
                yield _event(reply.progress(item))
                continue
            for chunk in reply.pieces(item):
                yield _event(chunk)
        for chunk in reply.closing(generation.totals):
            yield _event(chunk)
    except Exception as error:
        # The head is out and said 200: this is the only place left to say it.
        if not isinstance(error, EngineError):
            logger.error("a stream failed: %s", summarize_exception(error))
        yield f"data: {error_body(error)}\n\n".encode()
    yield DONE


def _event(chunk: BaseModel) -> bytes:
    return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n".encode()
