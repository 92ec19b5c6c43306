"""The bridge between the event loop and the MLX thread."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TypeVar
from weakref import WeakSet

from batching.adapters.adapter import NoAdapters
from batching.adapters.files.adapter_file import AdapterFile
from batching.adapters.files.fitting import fit
from batching.batch_inference import BatchInferenceEngine
from batching.constraints.grammar import GrammarCompiler
from batching.engine.acceptance import Acceptance
from batching.engine.health import EngineHealth
from batching.engine.jobs import Load
from batching.engine.load_slices import LoadSlices
from batching.engine.loaded_engine import LoadedEngine
from batching.engine.memory_use import MemoryUse
from batching.engine.mlx_thread import MLXThread
from batching.engine.request_checks import check_request
from batching.engine.served_engine import ServedEngine
from batching.engine.streams.stream_router import AdaptersInUse, StreamRouter
from batching.engine.streams.token_stream import Backlog, TokenStream
from batching.errors import AdapterError, EngineError, EngineStalled, EngineStopped
from batching.inputs.sequence_spec import SequenceSpec
from batching.model_info.model import ModelInfo
from batching.request import BatchRequest
from batching.scheduling.snapshot import EngineSnapshot
from batching.steps.observer import EngineObserver, SequenceStats
from batching.steps.stats import SchedulerStats
from batching.steps.token_output import FinishReason

T = TypeVar("T")


class AsyncEngine:
    """The interface of a model's engine for the event loop.

    The MLX thread owns the engine and every `mlx.array`; the event loop owns the `StreamRouter` and all
    streams.

    All methods belong to the event loop, except `start()`, `stop()`, `check()` and `is_alive`, which any
    thread may use.  When the engine stops, every open stream and pending call raises EngineStopped, or
    its subclass EngineClosed after `stop()`.

    model, grammars, startup_lines, memory, health: available once the model is loaded.
    adapter: what is added to the model for all that is submitted; see `adapted`.
    """

    model: ModelInfo
    grammars: GrammarCompiler
    startup_lines: tuple[str, ...]
    memory: MemoryUse
    health: EngineHealth
    adapter: AdapterFile | None = None

    def __init__(
        self,
        build: Callable[[LoadSlices], LoadedEngine],
        thread: MLXThread | None = None,
        *,
        step_timeout: float = 120.0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Prepare the engine; `start()` or `begin()` loads its model.

        build: loads the model and makes the engine; it runs in the MLX thread.
        thread: the MLX thread, which the engines of a process share; None is one of its own.
        step_timeout: seconds after which a step counts as stalled.
        clock: in seconds; arrival times and statistics are on it.
        """
        self._clock = clock
        self._step_timeout = step_timeout
        self._request_ids = itertools.count()
        self._router = StreamRouter(clock())
        self._backlog = Backlog()
        self._has_own_thread = thread is None
        self._thread = MLXThread(clock) if thread is None else thread
        self._load = Load(build, self._router)
        self._served: ServedEngine | None = None
        # Those that are known to fit.
        self._fitting = WeakSet[AdapterFile]()

    def begin(self) -> Load:
        """Queue the load of the model; `finish()` is to be called when it has ended.

        Raises:
            EngineStopped: the MLX thread has ended.
        """
        self._thread.start()
        self._thread.load(self._load)
        return self._load

    def finish(self) -> None:
        """Take what was loaded.

        Raises:
            ModelLoadError: the model cannot be found or read.
            LoadCancelled: it was cancelled.
        """
        served = self._load.future.result()
        self.model, self.startup_lines = served.model, served.startup_lines
        self.memory = served.memory
        self.grammars = GrammarCompiler(
            self.model.tokenizer, self.model.vocab_size, self.model.eos_token_ids
        )
        self.health = EngineHealth(
            served,
            self._thread,
            self._router,
            step_timeout=self._step_timeout,
            clock=self._clock,
        )
        self._acceptance = Acceptance(self.health)
        self._served = served

    def start(self) -> None:
        """Load the model, and wait for that.

        Raises:
            ModelLoadError: the model cannot be found or read.
        """
        self.begin()
        try:
            self.finish()
        except BaseException:
            self.stop()
            raise

    def stop(self, timeout: float | None = None) -> None:
        """End the engine after the current step, and wait up to `timeout` seconds for that.

        Open streams get EngineClosed.
        """
        if self._has_own_thread:
            self._thread.stop(timeout)
        else:
            with suppress(TimeoutError):
                self.end().result(timeout)

    def end(self) -> Future[None]:
        """End the engine after the current step; its streams get EngineClosed."""
        ended = Future[None]()
        if self._served is not None:
            with suppress(EngineStopped):
                return self._thread.close(self._served)
        ended.set_result(None)
        return ended

    @property
    def observer(self) -> EngineObserver:
        """The observer that is called, in the event loop, for every step and every sequence."""
        return self._router.observer

    @observer.setter
    def observer(self, observer: EngineObserver) -> None:
        self._router.observer = observer

    @property
    def latest_stats(self) -> SchedulerStats:
        """The statistics after the last step, without requests that have ended since, and with new ones."""
        return self._router.current_stats()

    @property
    def is_alive(self) -> bool:
        """False before the model is loaded, and once the engine has stopped, by itself or by `stop()`."""
        return self._served is not None and self._served.ended_with is None

    def adapted(self, adapter: AdapterFile) -> "AsyncEngine":
        """Return this engine with an adapter, as a model of its own, with the name of that.

        Who has it, or a stream of it, holds the adapter's file.

        Raises:
            AdapterError: the adapter does not fit the model, or its requests fail.
        """
        if (fault := adapter.fault) is not None:
            raise AdapterError(fault)
        if adapter not in self._fitting:
            layers = self.model.adapters
            if isinstance(layers, NoAdapters):
                raise AdapterError(f"the model '{self.model.model_id}' {layers.reason}")
            fit(adapter, layers)
            self._fitting.add(adapter)
        engine = copy(self)
        engine.model, engine.adapter = self.model.adapted(adapter.adapter.name), adapter
        return engine

    @property
    def adapters_in_use(self) -> AdaptersInUse:
        """The adapters of requests that run, and of requests that wait."""
        return self._router.adapters()

    def check(self, specs: Sequence[SequenceSpec]) -> None:
        """Check that the model can serve these specs; `submit` relies on it.

        Raises:
            RequestError: a prompt or a parameter can never be served; see `check_request`.
        """
        for spec in specs:
            check_request(self.model, spec)

    async def submit(self, specs: Sequence[SequenceSpec]) -> TokenStream:
        """Queue the choices of each spec and return the stream of their tokens.

        The choices of a spec have consecutive indices in the stream, which fails at the first of the time
        limits.  It returns when the engine has accepted the requests, so that an engine that has stopped
        fails here and not in the stream.

        Call `check` first: a request that can never be served fails an assertion here.

        Raises:
            DeadlineExceeded: the time limit was over before the engine accepted the requests.
            EngineStopped, EngineStalled: the engine cannot serve requests.
        """
        if self.health.is_stalled:
            raise EngineStalled
        requests: list[BatchRequest] = []
        for spec in specs:
            if spec.max_tokens is None:
                spec = replace(spec, max_tokens=self.model.max_model_len - len(spec.prompt))
            if self.adapter is not None:
                spec = replace(spec, adapter=self.adapter.adapter)
            arrival_time = self._clock()
            request = BatchRequest(next(self._request_ids), spec, arrival_time=arrival_time)
            fork_ids = itertools.islice(self._request_ids, spec.num_choices - 1)
            requests += [request, *map(request.fork, fork_ids)]
        limits = [spec.time_limit for spec in specs if spec.time_limit is not None]
        return await self._add(requests, min(limits, default=None))

    async def call(self, func: Callable[[BatchInferenceEngine], T]) -> T:
        """Run `func` on the engine, in its thread, between two steps; return its result.

        Raises:
            EngineStopped: the engine has stopped.
        """
        return await asyncio.wrap_future(self._post(func))

    async def stats(self) -> SchedulerStats:
        return await self.call(lambda engine: engine.stats())

    async def snapshot(self) -> EngineSnapshot:
        """Return a picture of the queue, the requests and the pool between two steps."""
        return await self.call(lambda engine: engine.snapshot())

    def fail_streams(self, error: EngineError) -> None:
        """End all open streams with an error; the engine aborts their requests when it can.

        Those fail as well that wait for the engine to accept them, and all that follow if it has stopped.
        """
        if isinstance(error, EngineStopped) and self._served is not None:
            # Its thread may never say so.
            self._served.ended_with = error
        self._acceptance.fail(error)
        for request_id in self._router.fail_all(error, self._clock()):
            self._abort(request_id)

    async def _add(self, requests: Sequence[BatchRequest], time_limit: float | None) -> TokenStream:
        loop = asyncio.get_running_loop()
        self._router.bind(loop)
        ids = [request.request_id for request in requests]
        stream = TokenStream(
            [_sequence_stats(request) for request in requests],
            lambda index, reason: self._release(ids[index], reason),
            None if time_limit is None else loop.time() + time_limit,
            self._backlog,
        )
        self._router.open(stream, ids)
        try:
            added = self.call(lambda engine: engine.add(*requests))
            await self._acceptance.wait(added, time_limit)
        except BaseException:
            stream.close()
            raise
        return stream

    def _release(self, request_id: int, reason: FinishReason) -> None:
        """Stop routing to a request, and abort it if it has not ended."""
        if self._router.end(request_id, reason, self._clock()):
            self._abort(request_id)

    def _abort(self, request_id: int) -> None:
        with suppress(EngineStopped):
            self._post(lambda engine: engine.abort(request_id))

    def _post(self, func: Callable[[BatchInferenceEngine], T]) -> Future[T]:
        served = self._served
        assert served is not None, "the model is not loaded"
        if served.ended_with is not None:
            raise served.ended_with.with_traceback(None)
        return self._thread.post(partial(served.call, func))


def _sequence_stats(request: BatchRequest) -> SequenceStats:
    return SequenceStats(
        num_prompt_tokens=request.num_prompt_tokens,
        max_tokens=request.spec.output_limit,
        num_choices=request.spec.num_choices,
        priority=request.priority,
        arrival_time=request.arrival_time,
        adapter=None if request.spec.adapter is None else request.spec.adapter.name,
    )
