"""The thread that uses MLX: it loads models, runs the steps of their engines, and closes them."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, TypeVar

from batching.batch_inference import LOOK_INTERVAL
from batching.engine.frozen import freeze, thawed
from batching.engine.jobs import Job, Load
from batching.engine.load_slices import LoadCancelled
from batching.engine.reused_threads import start_reused_thread
from batching.engine.served_engine import ServedEngine
from batching.engine.stopwatch import Stopwatch
from batching.errors import EngineClosed, EngineStopped, RankLost
from batching.scheduling.engine_turns import Demand, EngineTurns, Turn

logger = logging.getLogger(__name__)

T = TypeVar("T")


class MLXThread:
    """Loads models, runs the steps of their engines, and closes them, all in one thread.

    No other thread uses MLX, since two of them crash it on a GPU.  Jobs arrive through `_inbox` and run
    between two steps.  Models are loaded one after the other, in slices between which the engines of
    others run steps: the thread is the `LoadSlices` of each load.  `EngineTurns` divides the time.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        """Prepare the thread; `start()` starts it.  `clock` is in seconds."""
        self._clock = clock
        # None asks the thread to end.
        self._inbox: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self._lock = threading.Lock()
        # Why the thread takes no more jobs; written under _lock, so that no job is left behind.
        self._ended_with: EngineStopped | None = None
        self._has_started = False
        self._has_ended = threading.Event()
        self._stopwatch = Stopwatch(clock)
        # Only the thread itself uses what follows.
        self._is_stopping = False
        self._loads: deque[Load] = deque()
        self._engines: list[ServedEngine] = []
        self._turns: EngineTurns[ServedEngine | Load] = EngineTurns()

    @property
    def busy_time(self) -> float:
        """For how many seconds the current step, or slice of a load, has run; 0 between two of them."""
        return self._stopwatch.elapsed

    @property
    def has_ended(self) -> bool:
        """True once the thread takes no more jobs."""
        return self._ended_with is not None

    def excuse(self, seconds: float) -> None:
        """Do not count seconds that have just passed; only one thread may call it."""
        self._stopwatch.excuse(seconds)

    def start(self) -> None:
        """Start the thread; does nothing if that was done before."""
        with self._lock:
            has_started, self._has_started = self._has_started, True
        if not has_started:
            start_reused_thread(self._run, self._has_ended.set)

    def stop(self, timeout: float | None = None) -> None:
        """Ask the thread to end after its current step or slice; wait up to `timeout` seconds for it.

        Open streams get EngineClosed.  By the end all that was loaded is given back.
        """
        self._inbox.put(None)
        if self._has_started:
            self._has_ended.wait(timeout)

    def post(self, func: Callable[[], T]) -> Future[T]:
        """Queue a call of `func`, to run between two steps; return its result.

        Raises:
            EngineStopped: the thread accepts no more jobs.
        """
        job = Job(func)
        with self._lock:
            if self._ended_with is not None:
                raise self._ended_with.with_traceback(None)
            self._inbox.put(job)
        return job.future

    def load(self, load: Load) -> None:
        """Queue a load.

        Raises:
            EngineStopped: the thread accepts no more jobs.
        """
        queued = self.post(partial(self._loads.append, load))
        # It fails if the thread ends first.
        queued.add_done_callback(load.fail_with)

    def close(self, served: ServedEngine) -> Future[None]:
        """Queue the end of an engine; its open streams get EngineClosed.

        Raises:
            EngineStopped: the thread accepts no more jobs.
        """
        return self.post(partial(self._close, served, EngineClosed()))

    def pause(self, progress: float | None = None) -> None:
        load = self._loads[0]
        if progress is not None:
            load.progress = progress
        self._turns.charge(load, self._stopwatch.stop())
        self._do_jobs_of(load)
        while self._step(load):
            self._do_jobs_of(load)
        self._stopwatch.start()

    def in_thread(self, func: Callable[[], T]) -> T:
        load, future = self._loads[0], Future[T]()
        # It wakes this thread.
        future.add_done_callback(lambda _: self._inbox.put(Job(lambda: None)))
        self._turns.charge(load, self._stopwatch.stop())
        name = "mlx-load"
        threading.Thread(target=_run_into, args=(future, func), name=name, daemon=True).start()
        while not future.done():
            if not self._step():
                self._wait()
            self._do_jobs_of(load)
        self._stopwatch.start()
        return future.result()

    def _run(self) -> None:
        reason = EngineStopped()
        try:
            while not self._is_stopping:
                self._do_jobs()
                if self._loads:
                    self._load()
                elif not self._step():
                    self._wait()
            reason = EngineClosed()
        except BaseException:
            logger.exception("the MLX thread failed")
        finally:
            self._end(reason)

    def _do_jobs(self) -> None:
        """Run the jobs that are in the inbox."""
        while not self._is_stopping:
            try:
                self._do(self._inbox.get_nowait())
            except Empty:
                return

    def _do_jobs_of(self, load: Load) -> None:
        """Run the jobs that are in the inbox, and end the load if it must not go on."""
        self._do_jobs()
        if self._is_stopping:
            raise LoadCancelled
        load.check()

    def _wait(self) -> None:
        """Wait for a job and run it; engines whose requests wait for a store look again and again."""
        if self._is_stopping:
            return
        # Not `can_step`: that may have become true since `_step` has asked.
        will_step = any(served.engine.will_step for served in self._engines)
        with suppress(Empty):
            self._do(self._inbox.get(timeout=LOOK_INTERVAL if will_step else None))

    def _do(self, job: Job[Any] | None) -> None:
        if job is None:
            self._is_stopping = True
        else:
            job.run()

    def _step(self, load: Load | None = None) -> bool:
        """Run a step of the engine whose turn it is; return False if none has work, or it is the load's turn."""
        if self._is_stopping:
            return False
        if load is None and len(self._engines) == 1:
            # There are no others to ask, and no time to divide.
            (only,) = self._engines
            return bool(self._guarded(only, only.step_alone))
        for served in [*self._engines]:
            self._guarded(served, served.report_if_idle)
        now, demands = self._clock(), dict[ServedEngine | Load, Demand]()
        for served in [*self._engines]:
            if (demand := self._guarded(served, partial(served.demand, now))) is not None:
                demands[served] = demand
        match self._turns.next(demands, now, load):
            case (ServedEngine() as served, Turn() as turn):
                began = self._clock()
                self._guarded(served, partial(served.step, turn))
                self._turns.charge(served, self._clock() - began)
                return True
        return False

    def _guarded(self, served: ServedEngine, func: Callable[[], T]) -> T | None:
        """Call a function of an engine; if it raises, the engine is of no further use and ends, alone."""
        self._stopwatch.start()
        try:
            return func()
        except EngineStopped as error:
            # That another rank is lost was said when that was found.
            is_said = isinstance(error, RankLost) and error.rank > 0
            logger.log(logging.DEBUG if is_said else logging.ERROR, "an engine stops: %s", error)
            reason = error.with_traceback(None)
        except BaseException:
            logger.exception("an engine failed and stops")
            reason = EngineStopped()
        finally:
            self._stopwatch.stop()
        self._close(served, reason)
        return None

    def _load(self) -> None:
        """Run the first load to its end."""
        load = self._loads[0]
        self._stopwatch.start()
        served = load.run(self)
        self._stopwatch.stop()
        self._turns.forget(load)
        self._loads.popleft()
        if served is not None:
            freeze()
            self._engines.append(served)
            served.call_when_read(partial(self._go_on, served))
            load.future.set_result(served)

    def _go_on(self, served: ServedEngine) -> None:
        """Wake the thread for an engine; any thread may call it."""
        with suppress(EngineStopped):
            self.post(served.go_on)

    def _close(self, served: ServedEngine, reason: EngineStopped) -> None:
        if served in self._engines:
            self._engines.remove(served)
            self._turns.forget(served)
            try:
                with thawed():
                    served.end(reason, self._clock())
            except BaseException:
                logger.exception("an engine could not be closed")

    def _end(self, reason: EngineStopped) -> None:
        with self._lock:
            self._ended_with = reason
        while not self._inbox.empty():
            if (job := self._inbox.get()) is not None:
                job.fail(reason)
        for load in self._loads:
            load.fail(reason)
        for served in [*self._engines]:
            self._close(served, reason)


def _run_into(future: Future[T], func: Callable[[], T]) -> None:
    """Set the result of a future to that of a function."""
    try:
        future.set_result(func())
    except BaseException as error:
        future.set_exception(error)
