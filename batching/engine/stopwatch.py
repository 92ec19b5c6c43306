"""How long the current step of the MLX thread has run, for the watchdog."""

from collections.abc import Callable


class Stopwatch:
    """Measures one step, or one slice of a load; one thread starts and stops it, any may read it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` is in seconds."""
        self._clock = clock
        self._began: float | None = None
        # Seconds that count for no step: all of them, and those before this step.
        self._excused = 0.0
        self._excused_before = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the start, without those excused; 0 if it is stopped."""
        began = self._began
        if began is None:
            return 0.0
        return self._clock() - began - (self._excused - self._excused_before)

    def excuse(self, seconds: float) -> None:
        """Do not count seconds that have just passed; only one thread may call it."""
        self._excused += seconds

    def start(self) -> None:
        self._excused_before = self._excused
        self._began = self._clock()

    def stop(self) -> float:
        """Stop it, if it runs; return the seconds since the start."""
        began, self._began = self._began, None
        return 0.0 if began is None else self._clock() - began
