"""The one door between the MLX thread and the event loop."""

import asyncio
import gc
import itertools
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Final, Generic, TypeVar

from batching.batch_inference import BatchInferenceEngine
from batching.constraints.grammar import GrammarCompiler
from batching.constraints.protocol import TokenConstraint
from batching.engine.loaded_engine import LoadedEngine
from batching.engine.token_stream import TokenStream
from batching.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EmptyPrompt,
    EngineError,
    EngineStalled,
    EngineStopped,
    InvalidRequest,
)
from batching.model_info import ModelInfo
from batching.observer import EngineObserver, Observers, SequenceStats, StepRecord
from batching.priority_queue import Priority
from batching.request import GREEDY, BatchRequest, SamplingParams, TokenOutput
from batching.scheduler import RequestFailure, RequestOutput, SchedulerStats

logger = logging.getLogger(__name__)

# One may be a poisoned request's or a passing shortage's; so many without an answer in between
# are the engine's.
_MAX_FAILED_STEPS: Final = 3

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


@dataclass(frozen=True, slots=True)
class StreamHandle:
    """Who hears of a request in the engine."""

    stream: TokenStream
    index: int

    @property
    def answer(self) -> SequenceStats:
        return self.stream.answers[self.index]

    def put(self, item: TokenOutput | EngineError) -> None:
        self.stream.put(self.index, item)


class EngineThread:
    """Runs an engine in its own thread and hands its tokens to the event loop.

    Only the engine thread touches the engine, and with it every array; only the event loop
    touches `_listeners`.  Jobs go in through `_inbox`; the tokens of a step come out in one
    `call_soon_threadsafe`, however many requests got one.

    `build` runs in the engine thread.  It loads the model, so whoever calls `start()` waits.
    When the engine cannot go on, every open stream and every job hears EngineStopped.

    observer: hears in the event loop of every step and every answer.
    latest_stats: as they stood after the last step, or when the engine last went idle.
    """

    model: ModelInfo
    grammars: GrammarCompiler
    startup_lines: tuple[str, ...]
    latest_stats: SchedulerStats

    def __init__(
        self,
        build: Callable[[], LoadedEngine],
        *,
        step_timeout: float = 120.0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`step_timeout` is in seconds: a step that takes longer has stalled."""
        self.observer: EngineObserver = Observers()
        self._build = build
        self._step_timeout = step_timeout
        self._clock = clock
        # None asks the thread to end.
        self._inbox: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._is_stopped = False  # written under _lock, so that no job is left behind
        self._step_began: float | None = None  # written by the engine thread only
        self._num_failed_steps = 0  # since an answer was complete; the event loop's
        self._last_step_ended = clock()
        self._request_ids = itertools.count()
        self._listeners: dict[int, StreamHandle] = {}
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

    @property
    def is_stalled(self) -> bool:
        """True while a step takes longer than any should."""
        return self.step_time > self._step_timeout

    @property
    def step_time(self) -> float:
        """For how many seconds the step that runs now has run; 0 between two steps."""
        began = self._step_began
        return 0.0 if began is None else self._clock() - began

    @property
    def seconds_since_step(self) -> float:
        """How long ago a step ended; also an engine without work makes none."""
        return self._clock() - self._last_step_ended

    @property
    def trouble(self) -> str | None:
        """Why the engine cannot be relied on, for the operator to read; None while it can."""
        if self._is_stopped:
            return "the engine has stopped"
        if self.is_stalled:
            return f"a step of the model has not ended for {self.step_time:.0f} s"
        if self._num_failed_steps >= _MAX_FAILED_STEPS:
            return f"{self._num_failed_steps} steps failed since an answer was complete"
        return None

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
        time_limit: float | None = None,
    ) -> TokenStream:
        """Queue `num_choices` answers to each prompt; one prompt's have consecutive indices.

        Without `max_tokens` an answer may fill the context.  What was cached with one
        `cache_salt` serves only requests with the same one.  After `time_limit` seconds
        the stream ends with DeadlineExceeded.

        Raises:
            RequestError: one can never be served as it is.
            DeadlineExceeded: the time was over before it could be queued.
            EngineStopped, EngineStalled: nobody is there to serve it.
        """
        self.check(prompts, max_tokens, sampling)
        if self.is_stalled:
            raise EngineStalled
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
        return await self._add(requests, num_choices, time_limit)

    async def call(self, func: Callable[[BatchInferenceEngine], T]) -> T:
        """Run `func` on the engine, in its thread, between two steps."""
        return await asyncio.wrap_future(self._post(func).future)

    async def stats(self) -> SchedulerStats:
        return await self.call(lambda engine: engine.stats())

    def fail_streams(self, error: EngineError) -> None:
        """End all that is open; the engine hears of it when it can."""
        for request_id, listener in list(self._listeners.items()):
            listener.put(error)
            self._release(request_id, "error")

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

    async def _add(
        self, requests: Sequence[BatchRequest], num_choices: int, time_limit: float | None
    ) -> TokenStream:
        loop = asyncio.get_running_loop()
        self._bind(loop)
        ids = [request.request_id for request in requests]
        stream = TokenStream(
            [_record(request, num_choices) for request in requests],
            lambda index, reason: self._release(ids[index], reason),
            None if time_limit is None else loop.time() + time_limit,
        )
        self._listeners |= {i: StreamHandle(stream, index) for index, i in enumerate(ids)}
        try:
            await self._within(time_limit, self.call(lambda engine: engine.add(*requests)))
        except BaseException:
            stream.close()
            raise
        return stream

    async def _within(self, time_limit: float | None, job: Awaitable[None]) -> None:
        """Wait for the engine to take requests, which it does between two steps."""
        has_deadline = time_limit is not None and time_limit < self._step_timeout
        try:
            # Not `wait_for`: Python 3.11's loses a cancellation that comes together with the result.
            async with asyncio.timeout(time_limit if has_deadline else self._step_timeout):
                await job
        except TimeoutError:
            raise (DeadlineExceeded if has_deadline else EngineStalled) from None

    def _release(self, request_id: int, reason: str) -> None:
        """Stop listening to a request, and abort it if it has not ended."""
        if request_id in self._listeners:
            self._end_answer(request_id, reason, self._clock())
            with suppress(EngineStopped):
                self._post(lambda engine: engine.abort(request_id))

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        assert not self._listeners or self._loop is loop, "one event loop at a time"
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
        self.latest_stats = loaded.engine.stats()
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
            self._step_began = self._clock()
            outputs = engine.step()
            self._step_began = None
            self._tell(self._deliver, outputs, engine.last_step)

    def _do_jobs(self, engine: BatchInferenceEngine) -> bool:
        """Empty the inbox, and wait at it while there is nothing to step; False to end."""
        while True:
            try:
                job = self._inbox.get_nowait()
            except Empty:
                if engine.has_work:
                    return True
                self._tell(self._deliver_stats, engine.stats())
                job = self._inbox.get()
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

    def _deliver(self, outputs: Sequence[RequestOutput | RequestFailure], step: StepRecord) -> None:
        self._num_failed_steps += step.has_failed
        self._last_step_ended, self.latest_stats = step.ended, step.stats
        self.observer.observe_step(step)
        for item in outputs:
            if (listener := self._listeners.get(item.request_id)) is None:
                continue
            if isinstance(item, RequestFailure):
                listener.put(item.error)
                self._end_answer(item.request_id, "error", step.ended)
            else:
                self._hand_over(item.request_id, listener, item.output, step.ended)

    def _hand_over(
        self, request_id: int, listener: StreamHandle, output: TokenOutput, now: float
    ) -> None:
        gap = listener.answer.take(output, now)
        if output.token_ids:
            self.observer.observe_tokens(listener.answer, len(output.token_ids), gap)
        listener.put(output)
        if output.finish_reason is not None:
            self._num_failed_steps = 0
            self._end_answer(request_id, output.finish_reason, now)

    def _end_answer(self, request_id: int, reason: str, now: float) -> None:
        """Stop listening to a request, whose answer ends here."""
        answer = self._listeners.pop(request_id).answer
        answer.finish_reason, answer.end_time = reason, now
        self.observer.observe_end(answer)

    def _deliver_stats(self, stats: SchedulerStats) -> None:
        self.latest_stats = stats
        self.observer.observe_stats(stats)

    def _fail_streams(self) -> None:
        self.fail_streams(EngineStopped())


def _record(request: BatchRequest, num_choices: int) -> SequenceStats:
    return SequenceStats(
        num_prompt_tokens=request.num_prompt_tokens,
        max_tokens=request.max_tokens,
        num_choices=num_choices,
        priority=request.priority,
        arrival_time=request.arrival_time,
    )
