"""What the generating endpoints share: the engine of a model, and the response of a generation."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from fastapi import Request, Response

from app.generation import Generation
from app.reply import Reply
from app.sse import EventStream
from batching import EngineThread, SchedulerManager

# Nobody gets it; nginx's number for a client that left, should it be logged somewhere.
_CLIENT_CLOSED_REQUEST = 499


async def engine_for(request: Request, model_id: str | None) -> EngineThread:
    """Return the engine of a model, the default one for None; loading it may take a while.

    Raises:
        ModelNotFound: no such model is served here.
        ModelLoadError: it cannot be found or read.
    """
    manager: SchedulerManager = request.app.state.manager
    wanted = manager.model_ids[0] if model_id is None else model_id
    return await anyio.to_thread.run_sync(manager.get, wanted)


async def respond(
    request: Request, generation: Generation, reply: Reply, *, stream: bool
) -> Response:
    """Return the response, which closes the generation."""
    if stream:
        return EventStream(generation, reply)
    try:
        async with _while_connected(request):
            text, finish_reason = await generation.collect()
            answer = reply.whole(text, finish_reason, generation.usage)
            return Response(answer.model_dump_json(), media_type="application/json")
    finally:
        generation.close()
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


@asynccontextmanager
async def _while_connected(request: Request) -> AsyncIterator[None]:
    """Run the body, or the part of it until the client goes: the framework would run all of it."""
    with anyio.CancelScope() as scope:
        listener = asyncio.create_task(_cancel_at_disconnect(request, scope))
        try:
            yield
        finally:
            listener.cancel()


async def _cancel_at_disconnect(request: Request, scope: anyio.CancelScope) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
