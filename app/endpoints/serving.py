"""What the generating endpoints share: the engine of a model, and the response of a generation."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

import anyio
from fastapi import Request, Response

from app.generation import Answer, Generation
from app.reply import Reply
from app.schemas.usage import Usage
from app.sse import EventStream
from app.submission import AnyRequest, Demands, GrammarDemand, demands
from batching import EngineThread, InvalidRequest, SchedulerManager

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


def check_choices(request: Request, body: AnyRequest) -> None:
    """Raise InvalidRequest if more answers are asked for than this server gives."""
    limit: int = request.app.state.max_choices
    if body.num_choices > limit:
        param = "n" if body.n > limit else "best_of"
        raise InvalidRequest(param, f"{limit} are the most answers to one prompt")


async def respond(
    request: Request, generation: Generation, reply: Reply, *, stream: bool
) -> Response:
    """Return the response, which closes the generation."""
    if stream:
        return EventStream(generation, reply)
    return await respond_whole(request, generation, reply)


async def demands_of(
    request: Request,
    engine: EngineThread,
    body: AnyRequest,
    *,
    grammar: GrammarDemand | None,
    prompt_logprobs: int | None = None,
) -> Demands:
    """Compile what a request asks of its answers, a few grammars at a time."""
    compiling = None if grammar is None else request.app.state.compiling
    work = partial(demands, engine, body, grammar=grammar, prompt_logprobs=prompt_logprobs)
    return await anyio.to_thread.run_sync(work, limiter=compiling)


class Answering(Protocol):
    """Work on answers that are told when they are complete."""

    @property
    def usage(self) -> Usage: ...

    async def collect(self) -> Sequence[Answer]: ...

    def close(self) -> None: ...


async def respond_whole(request: Request, answering: Answering, reply: Reply) -> Response:
    """Return all answers at once; the work on them ends when the client goes."""
    try:
        async with _while_connected(request):
            answers = await answering.collect()
            write = partial(_written, reply, answers, answering.usage)
            return Response(await anyio.to_thread.run_sync(write), media_type="application/json")
    finally:
        answering.close()
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


def _written(reply: Reply, answers: Sequence[Answer], usage: Usage) -> str:
    """Return the body, which takes a second where many answers tell the odds of their tokens."""
    return reply.whole(answers, usage).model_dump_json(exclude_unset=True)


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
