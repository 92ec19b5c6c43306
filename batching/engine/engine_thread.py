"""The only bridge between the event loop and the engine's thread."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Final, TypeVar

from batching.batch_inference import BatchInferenceEngine
from batching.constraints.grammar import GrammarCompiler
from batching.constraints.protocol import TokenConstraint
from batching.engine.engine_worker import EngineWorker
from batching.engine.loaded_engine import LoadedEngine
from batching.engine.request_checks import check_request
from batching.engine.stream_router import StreamRouter
from batching.engine.token_stream import TokenStream
from batching.errors import DeadlineExceeded, EngineError, EngineStalled, EngineStopped
from batching.model_info import ModelInfo
from batching.observer import EngineObserver, SequenceStats
from batching.pooling import PoolingParams
from batching.priority_queue import Priority
from batching.request import GREEDY, BatchRequest, FinishReason, SamplingParams
from batching.steps.snapshot import EngineSnapshot
from batching.steps.stats import SchedulerStats

# One may be due to a poisoned request or to a passing shortage; this many without a completion
# in between are the engine's fault.
_MAX_FAILED_STEPS: Final = 3

T = TypeVar("T")


class EngineThread:
    """Runs an engine in its own thread and hands its tokens to the event loop.

    The worker owns the thread, and the thread the engine; the event loop owns the router and
    calls everything here but `start()`, `stop()`, `check()` and the properties of health, which
    any thread may use.  When the engine stops, every open stream and call gets EngineStopped, and
    EngineClosed where that was asked for.
    """

    model: ModelInfo
    grammars: GrammarCompiler
    startup_lines: tuple[str, ...]

    def __init__(
        self,
        build: Callable[[], LoadedEngine],
        *,
        step_timeout: float = 120.0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`build` runs in the engine's thread; a step of over `step_timeout` seconds has stalled."""
        self._clock = clock
        self._step_timeout = step_timeout
        self._request_ids = itertools.count()
        self._router = StreamRouter(clock())
        self._worker = EngineWorker(build, self._router, clock)

    def start(self) -> None:
        """Start the thread and wait until the engine is built.

        Raises:
            ModelLoadError: the model cannot be found or read.
        """
        loaded = self._worker.start()
        self.model, self.startup_lines = loaded.model, loaded.startup_lines
        self.grammars = GrammarCompiler(
            self.model.tokenizer, self.model.vocab_size, self.model.eos_token_ids
        )

    def stop(self, timeout: float | None = None) -> None:
        """End the thread after its current step; open streams get EngineClosed."""
        self._worker.stop(timeout)

    @property
    def observer(self) -> EngineObserver:
        """What is notified, in the event loop, of every step and every sequence."""
        return self._router.observer

    @observer.setter
    def observer(self, observer: EngineObserver) -> None:
        self._router.observer = observer

    @property
    def latest_stats(self) -> SchedulerStats:
        """The statistics after the last step, or when the engine last became idle."""
        return self._router.latest_stats

    @property
    def is_alive(self) -> bool:
        """False once the engine has stopped, by itself or by `stop()`."""
        return not self._worker.is_stopped

    @property
    def is_stalled(self) -> bool:
        """True while a step takes longer than the step timeout."""
        return self._worker.step_time > self._step_timeout

    @property
    def seconds_since_step(self) -> float:
        """How long ago a step ended; an idle engine makes none."""
        return self._clock() - self._router.last_step_ended

    @property
    def unhealthy_reason(self) -> str | None:
        """Why the engine is unhealthy, for the operator to read; None while it is healthy."""
        if not self.is_alive:
            return "the engine has stopped"
        if self.is_stalled:
            return f"a step of the model has not ended for {self._worker.step_time:.0f} s"
        if (num_failed := self._router.num_failed_steps) >= _MAX_FAILED_STEPS:
            return f"{num_failed} steps failed since a completion was finished"
        return None

    def check(
        self, prompts: Sequence[Sequence[int]], max_tokens: int | None, sampling: SamplingParams
    ) -> None:
        """Raise RequestError if prompts can never be served; `submit` relies on it."""
        check_request(self.model, prompts, max_tokens, sampling)

    async def submit(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: SamplingParams = GREEDY,
        max_tokens: int | None = None,
        stop_token_ids: frozenset[int] = frozenset(),
        constraint: TokenConstraint | None = None,
        priority: Priority = Priority.NORMAL,
        is_best_effort: bool = False,
        num_choices: int = 1,
        cache_salt: str | None = None,
        reports_progress: bool = False,
        pooling: PoolingParams | None = None,
        time_limit: float | None = None,
    ) -> TokenStream:
        """Queue `num_choices` completions of each prompt; one prompt's have consecutive indices.

        `check` comes first: a request that can never be served fails here by an assertion.
        Without `max_tokens` a completion may fill the context.  What was cached with one
        `cache_salt` serves only requests with the same one.  After `time_limit` seconds
        the stream ends with DeadlineExceeded.  With `pooling` each prompt gets a vector instead of
        tokens, and `max_tokens` is 0.

        Raises:
            DeadlineExceeded: the time was over before it could be queued.
            EngineStopped, EngineStalled: the engine cannot serve it.
        """
        if self.is_stalled:
            raise EngineStalled
        requests: list[BatchRequest] = []
        for prompt in prompts:
            room = self.model.max_model_len - len(prompt)
            request = BatchRequest(
                next(self._request_ids),
                prompt,
                max_tokens=room if max_tokens is None else max_tokens,
                sampling=sampling,
                stop_token_ids=stop_token_ids,
                constraint=constraint and constraint.fork(),
                priority=priority,
                is_best_effort=is_best_effort,
                arrival_time=self._clock(),
                cache_salt=cache_salt or "",
                reports_progress=reports_progress,
                pooling=pooling,
            )
            fork_ids = itertools.islice(self._request_ids, num_choices - 1)
            requests += [request, *map(request.fork, fork_ids)]
        return await self._add(requests, num_choices, time_limit)

    async def call(self, func: Callable[[BatchInferenceEngine], T]) -> T:
        """Run `func` on the engine, in its thread, between two steps."""
        return await asyncio.wrap_future(self._worker.post(func).future)

    async def stats(self) -> SchedulerStats:
        return await self.call(lambda engine: engine.stats())

    async def snapshot(self) -> EngineSnapshot:
        """Return what the engine has to do, as it is between two steps."""
        return await self.call(lambda engine: engine.snapshot())

    def fail_streams(self, error: EngineError) -> None:
        """End all open streams with an error; the engine aborts their requests when it can."""
        for request_id in self._router.fail_all(error, self._clock()):
            self._abort(request_id)

    async def _add(
        self, requests: Sequence[BatchRequest], num_choices: int, time_limit: float | None
    ) -> TokenStream:
        loop = asyncio.get_running_loop()
        self._router.bind(loop)
        ids = [request.request_id for request in requests]
        stream = TokenStream(
            [_sequence_stats(request, num_choices) for request in requests],
            lambda index, reason: self._release(ids[index], reason),
            None if time_limit is None else loop.time() + time_limit,
        )
        self._router.open(stream, ids)
        try:
            added = self.call(lambda engine: engine.add(*requests))
            await self._await_with_timeout(time_limit, added)
        except BaseException:
            stream.close()
            raise
        return stream

    async def _await_with_timeout(self, time_limit: float | None, job: Awaitable[None]) -> None:
        """Wait for the engine to take requests, which it does between two steps."""
        has_deadline = time_limit is not None and time_limit < self._step_timeout
        try:
            # Not `wait_for`: Python 3.11's loses a cancellation that comes together with the result.
            async with asyncio.timeout(time_limit if has_deadline else self._step_timeout):
                await job
        except TimeoutError:
            raise (DeadlineExceeded if has_deadline else EngineStalled) from None

    def _release(self, request_id: int, reason: FinishReason) -> None:
        """Stop routing to a request, and abort it if it has not ended."""
        if self._router.end(request_id, reason, self._clock()):
            self._abort(request_id)

    def _abort(self, request_id: int) -> None:
        with suppress(EngineStopped):
            self._worker.post(lambda engine: engine.abort(request_id))


def _sequence_stats(request: BatchRequest, num_choices: int) -> SequenceStats:
    return SequenceStats(
        num_prompt_tokens=request.num_prompt_tokens,
        max_tokens=request.max_tokens,
        num_choices=num_choices,
        priority=request.priority,
        arrival_time=request.arrival_time,
    )
