"""The functions that are called when a model's state has changed."""

from collections.abc import Callable


class Listeners:
    """May be used from any thread: each use is one operation on a list."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[], object]] = []

    def add(self, listener: Callable[[], object]) -> Callable[[], None]:
        """Call a function after every change, and at the end; return what ends that.

        It is called in any thread, and must not wait.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def tell(self) -> None:
        for listener in [*self._listeners]:
            listener()
