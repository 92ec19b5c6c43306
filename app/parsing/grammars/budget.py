"""Bounds on what one request's tools are read and written as."""

from batching import InvalidRequest


class ToolsTooLarge(InvalidRequest):
    def __init__(self, limit: int, unit: str) -> None:
        message = f"together they are too large to be enforced: they have more than {limit} {unit}"
        super().__init__("tools", message)


class Budget:
    """How much of something all tools of a request may still take together; work is in proportion to it."""

    def __init__(self, limit: int, unit: str) -> None:
        self._limit = limit
        self._unit = unit
        self._num_left = limit

    def take(self, number: int) -> None:
        """Raise ToolsTooLarge if there is not so much left; from then on, any number is too much."""
        self._num_left -= number
        if self._num_left < 0:
            raise ToolsTooLarge(self._limit, self._unit)
