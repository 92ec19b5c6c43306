"""What the generating endpoints share: the engine of a model, and the response of a generation."""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Final, Protocol

import anyio
from fastapi import Request, Response

from app.admission.controller import AdmissionTicket
from app.api.openai.schemas.usage import Totals
from app.api.response_builder import ResponseBuilder
from app.api.sse import EventStream
from app.generation.generation import Answer, Generation
from app.generation.submit import AnyRequest, GenerationParams, GrammarSpec, bounded_tokens, demands
from app.http.client import ANONYMOUS, Client
from app.http.errors import CLIENT_CLOSED_REQUEST
from app.server_state import server_state
from batching import DeadlineExceeded, EngineThread, InvalidRequest, Priority

_TRACE_HEADERS: Final = ("traceparent", "tracestate")
_TIMEOUT_HEADER: Final = "X-Request-Timeout"


async def engine_for(request: Request, model_id: str | None) -> EngineThread:
    """Return the engine of a model, the default one for None; loading it may take a while.

    Raises:
        ModelNotFound: no such model is served here.
        ModelLoadError: it cannot be found or read.
    """
    manager = server_state(request).manager
    wanted = manager.model_ids[0] if model_id is None else model_id
    if (engine := manager.loaded(wanted)) is not None:
        return engine
    return await anyio.to_thread.run_sync(manager.get, wanted)


def enter(request: Request, priority: Priority = Priority.NORMAL) -> AdmissionTicket:
    """Give a request its place; see AdmissionController.enter."""
    state = request.scope.get("state", {})
    client: Client = state.get("client", ANONYMOUS)
    request_id: str = state.get("request_id", "-")
    place = server_state(request).admission.enter(client, priority, request_id)
    place.trace_headers = {
        name: request.headers[name] for name in _TRACE_HEADERS if name in request.headers
    }
    return place


@contextmanager
def counted(request: Request) -> Iterator[None]:
    """Count a request that the model need not answer."""
    place = enter(request)
    try:
        yield
    finally:
        place.leave()


@asynccontextmanager
async def admitted(request: Request, body: AnyRequest) -> AsyncIterator[AdmissionTicket]:
    """Give a request its place while it is prepared, and take it back if that fails.

    Raises:
        Refusal: there is no place for it.
        DeadlineExceeded: its time is over before it is prepared.
    """
    place = enter(request, body.queue_priority)
    try:
        place.timeout = _timeout(request, body)
        async with asyncio.timeout(place.time_left()):
            yield place
    except BaseException as error:
        place.leave()
        if isinstance(error, TimeoutError):
            raise DeadlineExceeded from None
        raise


def _timeout(request: Request, body: AnyRequest) -> float | None:
    """Return the seconds that a request has, by its field or its header, whichever is less."""
    if (text := request.headers.get(_TIMEOUT_HEADER)) is None:
        return body.timeout
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequest(_TIMEOUT_HEADER, "the header must be a number of seconds above 0")
    return seconds if body.timeout is None else min(seconds, body.timeout)


def check_choices(request: Request, body: AnyRequest) -> None:
    """Raise InvalidRequest if more answers are asked for than this server gives."""
    limit = server_state(request).settings.max_choices
    if body.num_choices > limit:
        param = "n" if body.n > limit else "best_of"
        raise InvalidRequest(param, f"{limit} are the most answers to one prompt")


def num_tokens_of(
    request: Request,
    engine: EngineThread,
    body: AnyRequest,
    prompts: Sequence[Sequence[int]],
    max_tokens: int | None,
) -> int | None:
    """Return the most tokens of each answer; None is as many as fit the context.

    Raises:
        InvalidRequest: together they are more than this server gives one request.
    """
    limit = server_state(request).settings.max_output_tokens
    return bounded_tokens(
        engine.model, [len(prompt) for prompt in prompts], body.num_choices, max_tokens, limit
    )


async def respond(
    request: Request, generation: Generation, reply: ResponseBuilder, *, stream: bool
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
    grammar: GrammarSpec | None,
    prompt_logprobs: int | None = None,
) -> GenerationParams:
    """Compile what a request asks of its answers, a few grammars at a time."""
    compiling = None if grammar is None else server_state(request).compiling
    work = partial(demands, engine, body, grammar=grammar, prompt_logprobs=prompt_logprobs)
    return await anyio.to_thread.run_sync(work, limiter=compiling)


class Answering(Protocol):
    """Work on answers that are told when they are complete."""

    @property
    def totals(self) -> Totals: ...

    async def collect(self) -> Sequence[Answer]: ...

    def close(self) -> None: ...


async def respond_whole(request: Request, answering: Answering, reply: ResponseBuilder) -> Response:
    """Return all answers at once; the work on them ends when the client goes."""
    try:
        async with _while_connected(request):
            answers = await answering.collect()
            write = partial(_written, reply, answers, answering.totals)
            return Response(await anyio.to_thread.run_sync(write), media_type="application/json")
    finally:
        answering.close()
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def _written(reply: ResponseBuilder, answers: Sequence[Answer], totals: Totals) -> str:
    """Return the body, which takes a second where many answers tell the odds of their tokens."""
    return reply.whole(answers, totals).model_dump_json(exclude_unset=True)


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
