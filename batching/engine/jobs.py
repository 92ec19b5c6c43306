"""What other threads ask of the MLX thread: calls, and models to load."""

import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from batching.engine.load_slices import LoadCancelled, LoadSlices
from batching.engine.loaded_engine import LoadedEngine
from batching.engine.served_engine import ServedEngine
from batching.engine.streams.stream_router import StreamRouter
from batching.errors import EngineStopped

T = TypeVar("T")


class Job(Generic[T]):
    """A call in the MLX thread; `future` gets its result."""

    def __init__(self, func: Callable[[], T]) -> None:
        self._func = func
        self.future: Future[T] = Future()

    def run(self) -> None:
        # False if the caller has cancelled it.
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._func())
        except BaseException as error:
            # Also the panics of what is written in Rust: its caller waits.
            self.future.set_exception(error)

    def fail(self, error: EngineStopped) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class Load:
    """A model to load; `future` gets its engine, or the error, which is LoadCancelled after `cancel`.

    progress: the share that is done, in [0, 1].
    is_cancelled: it ends at its next pause.
    """

    def __init__(self, build: Callable[[LoadSlices], LoadedEngine], router: StreamRouter) -> None:
        self.future: Future[ServedEngine] = Future()
        self.progress = 0.0
        self.is_cancelled = False
        self._build, self._router = build, router

    def cancel(self) -> None:
        """End the load at its next pause; any thread may call it, at any time."""
        self.is_cancelled = True

    def check(self) -> None:
        if self.is_cancelled:
            raise LoadCancelled

    def run(self, slices: LoadSlices) -> ServedEngine | None:
        """Build the engine, in the MLX thread; None if that has failed."""
        try:
            self.check()
            return ServedEngine(self._build(slices), self._router)
        except BaseException as error:
            # Its frames may hold the model.
            traceback.clear_frames(error.__traceback__)
            self.future.set_exception(error)
            return None

    def fail(self, error: EngineStopped) -> None:
        self.future.set_exception(error)

    def fail_with(self, queued: Future[None]) -> None:
        """Fail if it could not be queued."""
        if (error := queued.exception()) is not None:
            self.future.set_exception(error)
