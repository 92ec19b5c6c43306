"""The engine's thread, and the inbox through which other threads call the engine."""

import logging
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from batching.batch_inference import BatchInferenceEngine
from batching.engine.frozen import freeze, thawed
from batching.engine.loaded_engine import LoadedEngine
from batching.engine.mlx_thread import start_mlx_thread
from batching.engine.stream_router import StreamRouter
from batching.errors import EngineClosed, EngineStopped

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Job(Generic[T]):
    """A call on the engine; `future` gets its result."""

    def __init__(self, func: Callable[[BatchInferenceEngine], T]) -> None:
        self._func = func
        self.future: Future[T] = Future()

    def run(self, engine: BatchInferenceEngine) -> None:
        # False if the caller has cancelled it.
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._func(engine))
        except Exception as error:
            self.future.set_exception(error)

    def fail(self, error: EngineStopped) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class EngineWorker:
    """Builds an engine and runs its steps, in a thread of its own.

    Only this thread touches the engine and its arrays.  Jobs arrive through `_inbox` and run between two
    steps.  The outputs of a step reach the router in a single call of the event loop, however many
    requests have some.
    """

    def __init__(
        self,
        build: Callable[[], LoadedEngine],
        router: StreamRouter,
        clock: Callable[[], float],
    ) -> None:
        """`build` runs in the thread; `clock` is in seconds."""
        self._build = build
        self._router = router
        self._clock = clock
        # None asks the thread to end.
        self._inbox: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self._lock = threading.Lock()
        # Why the thread takes no more jobs; written under _lock, so that no job is left behind.
        self._ended_with: EngineStopped | None = None
        self._step_began: float | None = None  # written by the thread only
        # Seconds that count for no step: all of them, and those before this step.
        self._excused = 0.0
        self._excused_before = 0.0
        self._loaded: Future[LoadedEngine] = Future()
        self._has_started = False
        self._has_ended = threading.Event()

    @property
    def is_stopped(self) -> bool:
        return self._ended_with is not None

    @property
    def step_time(self) -> float:
        """For how many seconds the current step has run, those excused left out; 0 between two steps."""
        began = self._step_began
        if began is None:
            return 0.0
        return self._clock() - began - (self._excused - self._excused_before)

    def excuse(self, seconds: float) -> None:
        """Do not count seconds that have just passed; only one thread may call it."""
        self._excused += seconds

    def start(self) -> LoadedEngine:
        """Start the thread and wait until the engine is built; raise what `build` raises."""
        self._has_started = True
        loaded = self._loaded
        start_mlx_thread(self._main, self._has_ended.set)
        return loaded.result()

    def post(self, func: Callable[[BatchInferenceEngine], T]) -> Job[T]:
        """Queue a call of `func` on the engine.

        Raises:
            EngineStopped: the thread accepts no more jobs.
        """
        job = Job(func)
        with self._lock:
            if self._ended_with is not None:
                raise type(self._ended_with)
            self._inbox.put(job)
        return job

    def stop(self, timeout: float | None) -> None:
        """Ask the thread to end after its current step; wait up to `timeout` seconds for it.

        By then all that was loaded is given back.
        """
        self._inbox.put(None)
        if self._has_started:
            self._has_ended.wait(timeout)

    def _main(self) -> None:
        close = self._run()
        # Only here, where no frame has the engine any more.
        if close is not None:
            with thawed():
                close()

    def _run(self) -> Callable[[], None] | None:
        """Build the engine and run it to its end; return what closes it.

        None if it could not be built.
        """
        try:
            loaded = self._build()
        except BaseException as error:
            # Its frames may hold the model.
            traceback.clear_frames(error.__traceback__)
            self._end(EngineStopped())
            self._loaded.set_exception(error)
            return None
        # No event loop is bound yet, so the router is this thread's.
        self._router.latest_stats = loaded.engine.stats()
        freeze()
        self._loaded.set_result(loaded)
        reason = EngineStopped()
        try:
            self._serve(loaded.engine)
            reason = EngineClosed()
        except BaseException:
            logger.exception("the engine failed and stops")
        finally:
            self._end(reason)
            self._loaded = Future()
        return loaded.close

    def _serve(self, engine: BatchInferenceEngine) -> None:
        try:
            while self._do_jobs(engine):
                self._excused_before = self._excused
                self._step_began = self._clock()
                outputs = engine.step()
                self._step_began = None
                self._router.call_in_loop(self._router.deliver, outputs, engine.last_step)
        finally:
            engine.drain()

    def _do_jobs(self, engine: BatchInferenceEngine) -> bool:
        """Empty the inbox, and wait for a job while there is nothing to step; False to end."""
        while True:
            try:
                job = self._inbox.get_nowait()
            except Empty:
                if engine.has_work:
                    return True
                self._router.call_in_loop(self._router.deliver_stats, engine.stats())
                job = self._inbox.get()
            if job is None:
                return False
            job.run(engine)

    def _end(self, reason: EngineStopped) -> None:
        with self._lock:
            self._ended_with = reason
        while not self._inbox.empty():
            if (job := self._inbox.get()) is not None:
                job.fail(reason)
        self._router.call_in_loop(self._router.fail_all, reason, self._clock())
