"""The one door between the MLX thread and the event loop."""

import asyncio
import gc
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Generic, Self, TypeVar

from batching.batch_inference import BatchInferenceEngine
from batching.constraint import TokenConstraint
from batching.errors import (
    ContextLengthExceeded,
    EmptyPrompt,
    EngineError,
    EngineStopped,
    InvalidRequest,
)
from batching.grammar import GrammarCompiler
from batching.loaded_engine import LoadedEngine
from batching.model_info import ModelInfo
from batching.priority_queue import Priority
from batching.request import GREEDY, BatchRequest, SamplingParams, TokenOutput
from batching.scheduler import RequestFailure, RequestOutput, SchedulerStats

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Job(Generic[T]):
    """A call on the engine that somebody waits for."""

    def __init__(self, func: Callable[[BatchInferenceEngine], T]) -> None:
        self._func = func
        self.future: Future[T] = Future()

    def run(self, engine: BatchInferenceEngine) -> None:
        # False if the caller has gone: then there is nothing to do.
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._func(engine))
        except Exception as error:
            self.future.set_exception(error)

    def fail(self) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(EngineStopped())


class TokenStream:
    """The tokens of one or more answers, as they come; an async iterator of (index, TokenOutput).

    It ends after the last answer's output that carries a finish reason, or raises what ended
    one of them.  `close()` never waits and may be called at any time, any number of times:
    unfinished answers are aborted.
    """

    def __init__(self, thread: "EngineThread", request_ids: Sequence[int]) -> None:
        self._thread = thread
        self._request_ids = list(request_ids)
        self._unfinished = set(range(len(request_ids)))
        self._queue: asyncio.Queue[tuple[int, TokenOutput | EngineError]] = asyncio.Queue()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, TokenOutput]:
        while self._unfinished:
            index, item = await self._queue.get()
            if isinstance(item, EngineError):
                self.close()
                raise item
            if index not in self._unfinished:
                continue
            if item.finish_reason is not None:
                self._unfinished.remove(index)
            return index, item
        raise StopAsyncIteration

    def finish(self, index: int) -> None:
        """Take no more of one answer, and abort it if it has not ended."""
        self._unfinished.discard(index)
        self._thread.release(self._request_ids[index])

    def close(self) -> None:
        for index in range(len(self._request_ids)):
            self.finish(index)

    def put(self, request_id: int, item: TokenOutput | EngineError) -> None:
        self._queue.put_nowait((self._request_ids.index(request_id), item))


class EngineThread:
    """Runs an engine in its own thread and hands its tokens to the event loop.

    Only the engine thread touches the engine, and with it every array; only the event loop
    touches `_streams`.  Jobs go in through `_inbox`; the tokens of a step come out in one
    `call_soon_threadsafe`, however many requests got one.

    `build` runs in the engine thread.  It loads the model, so whoever calls `start()` waits.
    When the engine cannot go on, every open stream and every job hears EngineStopped.
    """

    model: ModelInfo
    grammars: GrammarCompiler
    startup_lines: tuple[str, ...]

    def __init__(
        self, build: Callable[[], LoadedEngine], *, clock: Callable[[], float] = monotonic
    ) -> None:
        self._build = build
        self._clock = clock
        # None asks the thread to end.
        self._inbox: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._is_stopped = False  # written under _lock, so that no job is left behind
        self._request_ids = itertools.count()
        self._streams: dict[int, TokenStream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loaded: Future[LoadedEngine] = Future()
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mlx-engine", daemon=True)

    def start(self) -> None:
        """Start the thread and wait until the engine is built.

        Raises:
            ModelLoadError: the model cannot be found or read.
        """
        self._thread.start()
        loaded = self._loaded.result()
        self.model, self.startup_lines = loaded.model, loaded.startup_lines
        self.grammars = GrammarCompiler(
            self.model.tokenizer, self.model.vocab_size, self.model.eos_token_ids
        )

    @property
    def is_alive(self) -> bool:
        """False once the engine has stopped, by itself or by `stop()`."""
        return not self._is_stopped

    async def submit(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: SamplingParams = GREEDY,
        max_tokens: int | None = None,
        stop_token_ids: frozenset[int] = frozenset(),
        constraint: TokenConstraint | None = None,
        priority: Priority = Priority.NORMAL,
        num_choices: int = 1,
        cache_salt: str | None = None,
        reports_progress: bool = False,
    ) -> TokenStream:
        """Queue `num_choices` answers to each prompt; one prompt's have consecutive indices.

        Without `max_tokens` an answer may fill the context.  What was cached with one
        `cache_salt` serves only requests with the same one.

        Raises:
            RequestError: one can never be served as it is.
            EngineStopped: nobody is there to serve it.
        """
        self.check(prompts, max_tokens, sampling)
        limit = self.model.max_model_len
        requests: list[BatchRequest] = []
        for prompt in prompts:
            request = BatchRequest(
                next(self._request_ids),
                prompt,
                max_tokens=limit - len(prompt) if max_tokens is None else max_tokens,
                sampling=sampling,
                stop_token_ids=stop_token_ids,
                constraint=constraint and constraint.fork(),
                priority=priority,
                arrival_time=self._clock(),
                cache_salt=cache_salt or "",
                reports_progress=reports_progress,
            )
            requests += [request, *(request.fork(i) for i in self._new_ids(num_choices - 1))]
        return await self._add(requests)

    async def call(self, func: Callable[[BatchInferenceEngine], T]) -> T:
        """Run `func` on the engine, in its thread, between two steps."""
        return await asyncio.wrap_future(self._post(func).future)

    async def stats(self) -> SchedulerStats:
        return await self.call(lambda engine: engine.stats())

    def release(self, request_id: int) -> None:
        """Stop listening to a request, and abort it if it has not ended."""
        if self._streams.pop(request_id, None) is not None:
            with suppress(EngineStopped):
                self._post(lambda engine: engine.abort(request_id))

    def stop(self, timeout: float | None = None) -> None:
        """End the thread after the step it is in; open streams hear EngineStopped."""
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._has_ended.wait(timeout)

    def check(
        self, prompts: Sequence[Sequence[int]], max_tokens: int | None, sampling: SamplingParams
    ) -> None:
        """Raise RequestError if prompts can never be served, as `submit` does."""
        for prompt in prompts:
            self._check(prompt, max_tokens)
        for token_id, _ in sampling.logit_bias:
            if not 0 <= token_id < self.model.vocab_size:
                raise InvalidRequest(
                    "logit_bias", f"token id {token_id} is not in [0, {self.model.vocab_size})"
                )

    def _check(self, token_ids: Sequence[int], max_tokens: int | None) -> None:
        limit, vocab_size = self.model.max_model_len, self.model.vocab_size
        if not token_ids:
            raise EmptyPrompt
        if len(token_ids) + (max_tokens or 1) > limit:
            raise ContextLengthExceeded(len(token_ids), max_tokens, limit)
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest("prompt", f"token id {token_id} is not in [0, {vocab_size})")

    def _new_ids(self, count: int) -> Iterator[int]:
        return itertools.islice(self._request_ids, count)

    async def _add(self, requests: Sequence[BatchRequest]) -> TokenStream:
        self._bind(asyncio.get_running_loop())
        stream = TokenStream(self, [request.request_id for request in requests])
        self._streams |= {request.request_id: stream for request in requests}
        try:
            await self.call(lambda engine: engine.add(*requests))
        except BaseException:
            stream.close()
            raise
        return stream

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        assert not self._streams or self._loop is loop, "one event loop at a time"
        self._loop = loop

    def _post(self, func: Callable[[BatchInferenceEngine], T]) -> Job[T]:
        job = Job(func)
        with self._lock:
            if self._is_stopped:
                raise EngineStopped
            self._inbox.put(job)
        return job

    # In the engine thread

    def _run(self) -> None:
        self._live()
        self._has_ended.set()
        # A thread that used MLX must not return: its thread-local destructors take the GIL, and
        # if the interpreter is about to finalize by then, that aborts the whole process.
        threading.Event().wait()

    def _live(self) -> None:
        try:
            loaded = self._build()
        except BaseException as error:
            self._end()
            self._loaded.set_exception(error)
            return
        # What is loaded stays: without this every full collection would walk all of it.
        gc.freeze()
        self._loaded.set_result(loaded)
        try:
            self._serve(loaded.engine)
        except BaseException:
            logger.exception("the engine cannot go on")
        finally:
            self._end()

    def _serve(self, engine: BatchInferenceEngine) -> None:
        while self._do_jobs(engine):
            if outputs := engine.step():
                self._tell(self._deliver, outputs)

    def _do_jobs(self, engine: BatchInferenceEngine) -> bool:
        """Empty the inbox, and wait at it while there is nothing to step; False to end."""
        while True:
            try:
                job = self._inbox.get(block=not engine.has_work)
            except Empty:
                return True
            if job is None:
                return False
            job.run(engine)

    def _end(self) -> None:
        with self._lock:
            self._is_stopped = True
        while not self._inbox.empty():
            if (job := self._inbox.get()) is not None:
                job.fail()
        self._tell(self._fail_streams)

    def _tell(self, func: Callable[..., None], *args: object) -> None:
        """Have the event loop call `func`; nobody listens any more if it is closed."""
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(func, *args)

    # In the event loop

    def _deliver(self, outputs: Sequence[RequestOutput | RequestFailure]) -> None:
        for item in outputs:
            if (stream := self._streams.get(item.request_id)) is None:
                continue
            told = item.error if isinstance(item, RequestFailure) else item.output
            stream.put(item.request_id, told)
            if isinstance(item, RequestFailure) or item.output.finish_reason is not None:
                del self._streams[item.request_id]

    def _fail_streams(self) -> None:
        for request_id, stream in self._streams.items():
            stream.put(request_id, EngineStopped())
        self._streams.clear()
