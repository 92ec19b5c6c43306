"""The bytes of all models: reserved before a load, settled after it."""

from collections.abc import Mapping

from batching.errors import ModelTooLarge
from batching.models.residency.model_state import MemoryNeed


class Ledger:
    """An account of the device's memory: no more is given away than there is.

    capacity: bytes for all models together.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: dict[str, int] = {}

    @property
    def used(self) -> int:
        return sum(self._entries.values())

    @property
    def free(self) -> int:
        """The bytes that nothing has; below 0 if a model takes more than was expected."""
        return self.capacity - self.used

    def of(self, model_id: str) -> int:
        """Return the bytes of a model; 0 if it has none."""
        return self._entries.get(model_id, 0)

    def check(self, needs: Mapping[str, MemoryNeed | None]) -> None:
        """Raise ModelTooLarge if models do not fit together; None is a need that is not known."""
        total = 0
        for model_id, need in needs.items():
            least = 0 if need is None else need.least
            if total + least > self.capacity:
                raise ModelTooLarge(model_id, least, self.capacity - total, total)
            total += least

    def reserve(self, model_id: str, num_bytes: int) -> None:
        assert model_id not in self._entries, "a model is reserved once"
        self._entries[model_id] = num_bytes

    def settle(self, model_id: str, num_bytes: int) -> None:
        """Replace what was reserved by what the model takes."""
        assert model_id in self._entries, "a model is reserved before it is loaded"
        self._entries[model_id] = num_bytes

    def release(self, model_id: str) -> None:
        del self._entries[model_id]
