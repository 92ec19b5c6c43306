"""The use of a model by a request."""

from collections.abc import Callable
from concurrent.futures import Future

from batching.engine.async_engine import AsyncEngine
from batching.models.residency.actions import Waiter


class Lease:
    """The use of a model, which stays loaded until `release`."""

    def __init__(self, engine: AsyncEngine, release: Callable[[], None]) -> None:
        self.engine = engine
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """End the use; it never waits, and may be repeated and called in any thread."""
        release, self._release = self._release, None
        if release is not None:
            release()


class LeaseRequest:
    """A request for a lease; `future` gets it, or the error why there is none.

    `close` ends the wait, or the lease if there is one; it never waits, and may be repeated.
    """

    def __init__(
        self,
        model_id: str,
        due_time: float,
        leave: Callable[["LeaseRequest"], None],
        *,
        is_best_effort: bool = False,
    ) -> None:
        self.future: Future[Lease] = Future()
        self.waiter = Waiter(model_id, due_time, self.future, is_best_effort)
        self._leave = leave

    def close(self) -> None:
        if self.future.cancel():
            self._leave(self)
        elif not self.future.cancelled() and self.future.exception() is None:
            self.future.result().release()
