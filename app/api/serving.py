"""The common parts of all APIs that generate: admission, building a job, the JSON response."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Final, Protocol, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel

from app.admission.admitted_request import AdmittedRequest, Deadline
from app.admission.controller import AdmissionTicket
from app.admission.patience import after_departures
from app.api.sse import PING_INTERVAL
from app.generation.generation import ChoiceResult, GenerationSummary, GenerationTask
from app.generation.job import GenerationJob, build_job
from app.generation.params import GenerationParams
from app.http.client import Client, client_in
from app.http.errors.rejections import Forbidden, ModelNotReady
from app.http.request_lifetime import held_by
from app.http.streams.early_stream import EVENTS, StreamForm, early_stream
from app.parsing.output_format import OutputFormat
from app.server_state import server_state
from app.settings import env_name
from batching import (
    AdapterError,
    AsyncEngine,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    LeaseRequest,
    PlacedImage,
    Priority,
)

T = TypeVar("T")

_TRACE_HEADERS: Final = ("traceparent", "tracestate")
# Tokens for which the way to a worker thread and back costs more than the event loop loses by doing it itself:
# both take a core from the model for a while.
SHORT: Final = 2048
# About what one takes as JSON.
LOGPROB_BYTES: Final = 64
NUMBER_BYTES: Final = 16
# In seconds: about what the load of a model takes.
_LOAD_RETRY_AFTER: Final = 10
_TICKET: Final = "ticket"
_WAITED_FOR: Final = "waited_for_model"
_TIMEOUT_HEADER: Final = "X-Request-Timeout"


async def engine_for(
    request: Request,
    model_id: str | None,
    *,
    is_streamed: bool = False,
    form: StreamForm = EVENTS,
    keep_alive: float | None = None,
) -> AsyncEngine:
    """Return the engine of a model, that of the default model for None; wait until it is loaded.

    It stays loaded until the request ends.  An adapter is a model, too: its engine is that of its base, adapted.

    is_streamed: the response is a stream of this form, which begins with comments if the load takes long.
    keep_alive: see `Residency.ask`.

    Raises:
        ModelNotFound: no such model is served here.
        ModelTooLarge: there is never room for it.
        ModelLoadError: the model cannot be found or read.
        ModelNotReady: the wait has taken too long.
        InvalidRequest: it is an adapter that does not fit its model.
    """
    state = server_state(request)
    manager = state.manager
    name = manager.model_ids[0] if model_id is None else model_id
    # What it is called may be another one when the model is loaded, or none.
    adapter = manager.adapter(name)
    base = manager.resolve(name) if adapter is None else adapter.base
    await measured(request, base)
    ticket: AdmissionTicket | None = request.scope["state"].get(_TICKET)
    priority = Priority.NORMAL if ticket is None else ticket.priority
    lease = manager.request(
        base,
        state.admission.clock() + priority / state.settings.aging_rate,
        is_best_effort=ticket is not None and ticket.is_best_effort,
        keep_alive=keep_alive,
    )
    held_by(request).callback(lease.close)
    if not lease.future.done():
        with _waiting_for(request, name):
            await _until_loaded(request, lease, form if is_streamed else None)
    engine = lease.future.result().engine
    try:
        return engine if adapter is None else engine.adapted(adapter.file)
    except AdapterError as error:
        raise InvalidRequest("model", str(error)) from None


async def measured(request: Request, name: str) -> None:
    """Have the manager know what a model needs, for which it may read files.

    Raises:
        ModelNotFound: no such model is served here.
    """
    manager = server_state(request).manager
    if not manager.is_measured(name):
        await prepared(request, partial(manager.measure, name))


async def _until_loaded(request: Request, lease: LeaseRequest, form: StreamForm | None) -> None:
    """Wait for a model, with a comment in the stream now and then.

    Raises:
        TimeoutError: it takes longer than the operator lets requests wait.
    """
    loaded = asyncio.wrap_future(lease.future)
    async with asyncio.timeout(server_state(request).settings.load_timeout):
        while not (await asyncio.wait([loaded], timeout=PING_INTERVAL))[0]:
            if form is not None:
                await early_stream(request).comment("the model is being loaded", form)
    # Its caller reads the error elsewhere.
    loaded.exception()


@contextmanager
def _waiting_for(request: Request, name: str) -> Iterator[None]:
    """Raise ModelNotReady if a time limit ends the block, also one of `admit` around it."""
    try:
        yield
    except TimeoutError:
        raise ModelNotReady(name, _LOAD_RETRY_AFTER) from None
    except asyncio.CancelledError:
        request.scope["state"][_WAITED_FOR] = name
        raise


async def prepared(request: Request, function: Callable[[], T]) -> T:
    """Call a blocking function that prepares a request or looks at its outputs, in a thread; keys alternate."""
    return await server_state(request).threads.prompts.run(function, client_of(request).name)


def check_admin(request: Request) -> None:
    """Raise Forbidden unless the client's key is one of an admin, or there are no keys."""
    if not client_of(request).is_admin:
        raise Forbidden(f"this needs a key of {env_name('admin_keys')}")


def client_of(request: Request) -> Client:
    """Return the client that `Authentication` has identified."""
    return client_in(request.scope)


async def take_ticket(request: Request, priority: Priority = Priority.NORMAL) -> AdmissionTicket:
    """Admit a request; it holds the ticket to its end, whatever becomes of it.

    Raises:
        Rejection: see `AdmissionController.admit`.
    """
    admission = server_state(request).admission
    ticket = await after_departures(lambda: admission.admit(client_of(request), priority))
    held_by(request).callback(ticket.release)
    request.scope["state"][_TICKET] = ticket
    return ticket


@asynccontextmanager
async def admit(
    request: Request, *, priority: Priority, time_limit: float | None
) -> AsyncIterator[AdmittedRequest]:
    """Admit a request, which the block prepares; see `take_ticket`.

    time_limit: in seconds; the header X-Request-Timeout may set a lower one.

    Raises:
        Rejection: see `AdmissionController.admit`.
        DeadlineExceeded: the time limit passes before the request is prepared.
    """
    state = server_state(request)
    ticket = await take_ticket(request, priority)
    arrival = state.admission.clock()
    deadline = Deadline(arrival, _time_limit(request, time_limit), state.admission.clock)
    try:
        async with asyncio.timeout(deadline.time_left()):
            yield AdmittedRequest(
                ticket=ticket,
                deadline=deadline,
                held=held_by(request),
                request_id=request.scope["state"].get("request_id", "-"),
                trace_headers={
                    n: request.headers[n] for n in _TRACE_HEADERS if n in request.headers
                },
                on_finish=state.on_finish,
            )
    except TimeoutError:
        if (name := request.scope["state"].get(_WAITED_FOR)) is not None:
            raise ModelNotReady(name, _LOAD_RETRY_AFTER) from None
        raise DeadlineExceeded from None


def _time_limit(request: Request, time_limit: float | None) -> float | None:
    """Return the lower of the request's own limit and that of its header, in seconds; None is no limit."""
    if (text := request.headers.get(_TIMEOUT_HEADER)) is None:
        return time_limit
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequest(_TIMEOUT_HEADER, "the header must be a number of seconds above 0")
    return seconds if time_limit is None else min(seconds, time_limit)


def _is_quick_to_build(
    prompts: Sequence[Sequence[int]], params: GenerationParams, output: OutputFormat
) -> bool:
    """Return whether building the job is so fast that it may run on the event loop."""
    asked = (output.grammar, params.logprobs, params.prompt_logprobs, params.allowed_token_ids)
    if any(each is not None for each in asked) or params.bad_words or params.dry:
        return False
    return sum(map(len, prompts)) <= SHORT


async def build_job_async(
    request: Request,
    engine: AsyncEngine,
    prompts: Sequence[Sequence[int]],
    params: GenerationParams,
    *,
    completion_id: str,
    output: OutputFormat,
    images: tuple[PlacedImage, ...] = (),
) -> GenerationJob:
    """Build a job, in a worker thread if that may take long; only a few grammars are compiled at a time.

    Raises:
        RequestError: see `build_job`.
    """
    state = server_state(request)
    if state.settings.clamp_max_tokens:
        params = replace(params, clamp_max_tokens=True)
    build = partial(
        build_job,
        engine,
        prompts,
        params,
        completion_id=completion_id,
        output=output,
        max_output_tokens=state.settings.max_output_tokens,
        images=images,
    )
    threads = state.threads.prompts if output.grammar is None else state.threads.grammars
    key = client_of(request).name
    try:
        if _is_quick_to_build(prompts, params, output):
            return build()
        return await threads.run(build, key)
    except ContextLengthExceeded as error:
        raise _with_advice(error) from None


def _with_advice(error: ContextLengthExceeded) -> ContextLengthExceeded:
    """Name the setting that would have served the request, if its prompt alone fits in the context."""
    if error.max_tokens is not None and error.num_prompt_tokens < error.limit:
        setting = f"{env_name('clamp_max_tokens')}=true"
        error.args = (
            f"{error} The server's setting {setting} reduces max_tokens to what is left.",
        )
    return error


# Writes a response as JSON.
Writer = Callable[[Sequence[ChoiceResult], GenerationSummary], str]


async def json_response(
    request: Request, task: GenerationTask, write: Writer, *, num_echoed: int = 0
) -> Response:
    """Return all choices in one JSON response.

    num_echoed: characters and tokens of prompts that it repeats.
    """

    async def collected() -> str | bytes:
        results = await task.collect()
        # It may take a while until there is room for the response.
        task.close()
        num_logprobs = sum(map(_num_logprobs, results))
        num_tokens = num_echoed + sum(len(each.token_ids) for each in results)
        if num_tokens <= SHORT and not num_logprobs:
            return write(results, task.summary)
        num_bytes = NUMBER_BYTES * num_tokens + LOGPROB_BYTES * num_logprobs
        return await written(request, partial(write, results, task.summary), num_bytes)

    return await respond_whole(task, collected)


class Closable(Protocol):
    def close(self) -> None: ...


async def respond_whole(task: Closable, body: Callable[[], Awaitable[str | bytes]]) -> Response:
    """Return a response with the JSON that `body` makes; `task` is closed before the client reads it."""
    try:
        return Response(await body(), media_type="application/json")
    finally:
        task.close()


def _num_logprobs(result: ChoiceResult) -> int:
    num_alternatives = sum(len(each.logprobs.top) for each in result.tokens)
    num_alternatives += sum(len(each.top) for each in result.prompt_logprobs)
    return num_alternatives + len(result.tokens) + len(result.prompt_logprobs)


async def written(
    request: Request, write: Callable[[], str], num_bytes: int | None = None
) -> bytes:
    """Write JSON in a worker thread; see `UnsentBytes.write`."""
    return await server_state(request).unsent.write(lambda: write().encode(), num_bytes)


def writer(build: Callable[[Sequence[ChoiceResult], GenerationSummary], BaseModel]) -> Writer:
    """Return a writer of the response model that `build` makes; it writes only fields that are set."""
    return lambda results, summary: build(results, summary).model_dump_json(exclude_unset=True)
