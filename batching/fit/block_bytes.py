"""The bytes of blocks of the KV pool, and how many of them a model has at least."""

from bisect import bisect_right
from dataclasses import dataclass
from math import ceil
from typing import Final

from batching.config import SchedulerConfig, blocks_held

# A share of the memory that is free once the model is loaded; the rest is for activations, for what
# else this process does, and for its neighbours.
POOL_SHARE: Final = 0.5
# Blocks of windowed layers, in use and cached, as a share of those of other layers: where memory is
# scarce, and where it is not; many short conversations are then found again.
_WINDOW_SHARE: Final = 3 / 40
_ROOMY_WINDOW_SHARE: Final = 5 / 16
# The pool holds the full windows of at least this share of the requests that run at once.
_FULL_WINDOWS_SHARE: Final = 1 / 2
# More than any memory has.
_ALL_BLOCKS: Final = 1 << 40
# A pool that the server sizes by itself has room for one request of so many tokens.
_MIN_TOKENS: Final = 1024


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """The bytes of one block in all layers.

    windowed: the share of sliding-window layers.
    least_windowed: the fewest blocks that a pool of these layers has; 0 if there are no such layers.
    """

    total: int
    windowed: int = 0
    least_windowed: int = 0

    def num_window_blocks(self, num_blocks: int) -> int:
        """Return the number of blocks for sliding-window layers, beside `num_blocks` in the main pool.

        0 means that they share the main pool, because it is not larger than their own would be.
        """
        if not self.windowed:
            return 0
        num = max(self.least_windowed, int(num_blocks * _WINDOW_SHARE))
        return num if num < num_blocks else 0

    def roomy_window_blocks(self, num_blocks: int) -> int:
        """Return that number if memory allows for the windows of all requests and for the prefix cache."""
        least = ceil(self.least_windowed / _FULL_WINDOWS_SHARE)
        num = max(least, int(num_blocks * _ROOMY_WINDOW_SHARE))
        return num if self.windowed and num < num_blocks else self.num_window_blocks(num_blocks)

    def of(self, num_blocks: int, num_window_blocks: int | None = None) -> int:
        """Return the bytes of a pool; None is the smallest number of blocks for sliding-window layers."""
        if num_window_blocks is None:
            num_window_blocks = self.num_window_blocks(num_blocks)
        in_windows = (num_window_blocks or num_blocks) * self.windowed
        return num_blocks * (self.total - self.windowed) + in_windows

    def num_within(self, num_bytes: int) -> int:
        """Return how many blocks fit in `num_bytes`."""
        return bisect_right(range(_ALL_BLOCKS), num_bytes, key=self.of) - 1


def least_window_blocks(limits: SchedulerConfig, window: int) -> int:
    """Return how many blocks of their own layers with this window have at least: those of some requests.

    More run at once where they are shorter than the window.
    """
    num_requests = ceil(limits.max_num_seqs * _FULL_WINDOWS_SHARE)
    return num_requests * blocks_held(window, limits.block_size) + limits.num_blocks_in_chunk


def least_blocks(model_context: int, block_size: int) -> int:
    """Return how many blocks a pool has at least that the server sizes by itself."""
    return -(-min(_MIN_TOKENS, model_context) // block_size)
