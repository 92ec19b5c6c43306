"""The memory of a loaded model."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The bytes of a loaded model: weights, packed or as stored; keys and values; recurrent states; slots of adapters."""

    weights: int = 0
    kv_cache: int = 0
    states: int = 0
    adapters: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.states + self.adapters


NO_MEMORY: Final = MemoryUse()
