"""Whether an engine can serve requests, and how long its last step is ago."""

from collections.abc import Callable
from typing import Final

from batching.engine.mlx_thread import MLXThread
from batching.engine.served_engine import ServedEngine
from batching.engine.streams.stream_router import StreamRouter

# One may be due to a poisoned request or to a passing shortage; this many without a completion
# in between are the engine's fault.
_MAX_FAILED_STEPS: Final = 3


class EngineHealth:
    """The health of an engine from the end of its load on; any thread may use it.

    step_timeout: seconds after which a step counts as stalled.
    """

    def __init__(
        self,
        served: ServedEngine,
        thread: MLXThread,
        router: StreamRouter,
        *,
        step_timeout: float,
        clock: Callable[[], float],
    ) -> None:
        self.step_timeout = step_timeout
        self._served = served
        self._thread = thread
        self._router = router
        self._clock = clock

    @property
    def is_stalled(self) -> bool:
        """True while a step takes longer than the step timeout, of this engine or another one."""
        return self._thread.busy_time > self.step_timeout

    @property
    def seconds_since_step(self) -> float:
        """Seconds since the end of the last step; it also grows while the engine is idle."""
        return self._clock() - self._router.last_step_ended

    @property
    def unhealthy_reason(self) -> str | None:
        """Why the engine is unhealthy, as a message for the operator; None while it is healthy."""
        if self._served.ended_with is not None:
            return "the engine has stopped"
        if self.is_stalled:
            return f"a step of the model has not ended for {self._thread.busy_time:.0f} s"
        if (num_failed := self._router.num_failed_steps) >= _MAX_FAILED_STEPS:
            return f"{num_failed} steps failed since a completion was finished"
        return None
