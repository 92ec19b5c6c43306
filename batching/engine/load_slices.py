"""Loading a model in slices, between which engines of other models run steps."""

from collections.abc import Callable
from typing import Final, Protocol, TypeVar

T = TypeVar("T")


class LoadCancelled(BaseException):
    """The load that is running is not wanted any more; raised between two of its slices.

    It is no Exception, so that what a model's own code raises can be caught without it.
    """


class LoadSlices(Protocol):
    """What a load calls again and again, so that the thread can do other work.

    It is called in the MLX thread; within a call of a model only where others can run (`hooks/layers.py`).
    """

    def pause(self, progress: float | None = None) -> None:
        """End a slice; return when the next one is due.

        progress: the share of the load that is done, in [0, 1]; None if this slice does not tell.

        Raises:
            LoadCancelled: the load is to end here.
        """
        ...

    def in_thread(self, func: Callable[[], T]) -> T:
        """Run a function that does not use MLX in another thread while engines run steps; return its result.

        Raises:
            LoadCancelled: the load is to end here.
        """
        ...


class OneSlice:
    """A load of a single slice, where there are no engines to wait for it."""

    def pause(self, progress: float | None = None) -> None:
        """Go on."""

    def in_thread(self, func: Callable[[], T]) -> T:
        return func()


ONE_SLICE: Final = OneSlice()
