"""One of the cores that compute, lent to the engine's thread between two steps."""

from typing import Any, Final

# Of more rows, arithmetic takes more of a step than memory does, and Python less.
_MAX_ROWS: Final = 16


class CoreLending:
    """Lends a core of the native kernels while a step of few rows begins.

    The engine's thread then has the tokens of the step before, and plans, while the queued step runs
    on the other cores: what memory gives, fewer cores can read as well.  On a core that computes,
    that thread would stop an operation in the middle, for which all others wait.
    """

    def __init__(self, kernels: Any = None) -> None:
        """Without the extension module nothing is lent."""
        self._kernels = kernels

    def lend_before(self, num_rows: int) -> None:
        """Lend a core when the step in flight ends, if the one now queued has so few rows."""
        if self._kernels is not None:
            self._kernels.lend_core_after_step(num_rows <= _MAX_ROWS)

    def take_back(self) -> None:
        """Compute with all cores: the engine's thread is about to wait."""
        if self._kernels is not None:
            self._kernels.take_core_back()


NO_LENDING: Final = CoreLending()
