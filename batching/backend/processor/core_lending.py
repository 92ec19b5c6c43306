"""One of the cores that compute, lent to the engine's thread between two steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final


class CoreLending:
    """Lends a core of the native kernels while a step begins.

    The engine's thread then returns the tokens of the step before, and plans, while the queued step
    runs on the other cores.  On a core that computes, that thread would stop an operation in the
    middle, for which all others wait.
    """

    def __init__(self, kernels: Any = None) -> None:
        """Without the extension module nothing is lent."""
        self._kernels = kernels

    def lend_before_step(self, *, is_queued: bool) -> None:
        """Lend a core when the step in flight ends, if this one is queued behind it."""
        if self._kernels is not None:
            self._kernels.lend_core_after_step(is_queued)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Compute with all cores while the engine's thread waits for the step in flight."""
        if self._kernels is None:
            yield
            return
        self._kernels.take_core_back()
        yield
        # If it had ended before a step was queued behind it, or its tokens are sampled by MLX.
        self._kernels.end_step()


NO_LENDING: Final = CoreLending()
