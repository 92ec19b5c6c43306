"""An engine among others of the MLX thread, with the router of its outputs."""

import logging
from collections.abc import Callable
from typing import Final, TypeVar

from batching.batch_inference import BatchInferenceEngine
from batching.engine.loaded_engine import LoadedEngine
from batching.engine.streams.stream_router import StreamRouter
from batching.errors import EngineStopped
from batching.scheduling.engine_turns import ALONE, Demand, Turn

logger = logging.getLogger(__name__)

T = TypeVar("T")

# For what was not stored beside requests, at the end.
_SAVE_SECONDS: Final = 2.0


class ServedEngine:
    """An engine that has been loaded, from then until it has ended; only the MLX thread uses it.

    ended_with: why it serves no more requests; None while it does.  Any thread may read it, and `model`,
        `startup_lines` and `memory`.
    """

    def __init__(self, loaded: LoadedEngine, router: StreamRouter) -> None:
        self.ended_with: EngineStopped | None = None
        self.model, self.startup_lines = loaded.model, loaded.startup_lines
        self.memory = loaded.memory
        self._loaded: LoadedEngine | None = loaded
        self._router = router
        # No event loop is bound yet, so that the router is this thread's.
        router.latest_stats = loaded.engine.stats()
        self._has_reported = True

    @property
    def engine(self) -> BatchInferenceEngine:
        """The engine.

        Raises:
            EngineStopped: it has ended.
        """
        if self._loaded is None:
            assert self.ended_with is not None
            raise self.ended_with.with_traceback(None)
        return self._loaded.engine

    def call(self, func: Callable[[BatchInferenceEngine], T]) -> T:
        """Call a function with the engine, between two steps.

        Raises:
            EngineStopped: the engine has ended.
        """
        self._has_reported = False
        return func(self.engine)

    def demand(self, now: float) -> Demand | None:
        """Return what there is to do; None if there is nothing."""
        return self.engine.demand(now) if self.engine.can_step else None

    def step_alone(self) -> bool:
        """Run a step, or report that there is none to run; return whether there was one."""
        self.report_if_idle()
        if not self.engine.can_step:
            return False
        self.step(ALONE)
        return True

    def step(self, turn: Turn) -> None:
        """Run a step; its outputs reach the router in a single call of the event loop.

        Raises:
            Exception: the engine is of no further use.
        """
        engine, self._has_reported = self.engine, False
        outputs = engine.step(turn)
        self._router.call_in_loop(self._router.deliver, outputs, engine.last_step)

    def call_when_read(self, func: Callable[[], None]) -> None:
        """Set what is called, in another thread, when `go_on` is due: something was read that requests wait for."""
        if self._loaded is not None and self._loaded.store is not None:
            self._loaded.store.call_when_read(func)

    def go_on(self) -> None:
        """Let requests go on that wait for the store."""
        if self._loaded is not None:
            self._loaded.engine.go_on()

    def report_if_idle(self) -> None:
        """Report the statistics once after the last step, or the last call: aborted requests have left since."""
        if not self._has_reported and not self.engine.has_work:
            self._has_reported = True
            self._router.call_in_loop(self._router.deliver_stats, self.engine.stats())

    def end(self, reason: EngineStopped, now: float) -> None:
        """Fail what is open, and give back what was loaded, once."""
        loaded, self._loaded = self._loaded, None
        assert loaded is not None
        self.ended_with = reason
        self._router.call_in_loop(self._router.fail_all, reason, now)
        close = loaded.close
        loaded.engine.drain()
        loaded.engine.save_rest(_SAVE_SECONDS)
        # `close` finds nothing that still refers to the model.
        del loaded
        close()
