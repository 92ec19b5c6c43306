"""Whether models can be loaded and run at all: by the MLX thread, and by all ranks."""

from collections.abc import Callable

from batching.engine.mlx_thread import MLXThread
from batching.errors import RankLost


class Health:
    """The health of what all models share; any thread may use it."""

    def __init__(
        self, thread: MLXThread, step_timeout: float, lost: Callable[[], RankLost | None] | None
    ) -> None:
        """step_timeout: seconds after which a part of a load counts as stalled.

        lost: returns why the ranks that the model is divided among can compute no more; None if it is not divided.
        """
        self._thread = thread
        self._step_timeout = step_timeout
        self._lost = lost

    @property
    def is_divided(self) -> bool:
        """Whether other processes have parts of the model; then there is no way on after a failure."""
        return self._lost is not None

    @property
    def lost_rank(self) -> RankLost | None:
        """Why the ranks can compute no more; None while they can."""
        return None if self._lost is None else self._lost()

    @property
    def unhealthy_reason(self) -> str | None:
        """Why no model can be loaded, as a message for the operator; None while the MLX thread and all ranks run."""
        if (lost := self.lost_rank) is not None:
            return str(lost)
        if self._thread.has_ended:
            return "the engine has stopped"
        if (seconds := self._thread.busy_time) > self._step_timeout:
            return f"a part of the load of a model has not ended for {seconds:.0f} s"
        return None

    def excuse(self, seconds: float) -> None:
        """Do not count seconds that have just passed as those of a step."""
        self._thread.excuse(seconds)
