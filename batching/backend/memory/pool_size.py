"""Calculates the number of blocks of the KV pool."""

from bisect import bisect_right
from dataclasses import dataclass
from math import ceil
from typing import Final

from batching.backend.memory.device import MIB, bytes_within, free_memory
from batching.config import EngineConfig, SchedulerConfig, blocks_held
from batching.errors import ModelLoadError, PoolTooLarge

# A share of the memory that is free once the model is loaded; the rest is for activations, for what
# else this process does, and for its neighbours.
_SHARE: Final = 0.5
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


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The number of blocks of a pool.

    num_window_blocks: blocks in the pool of sliding-window layers; 0 if they share the main pool.
    note: why there are fewer blocks than the limit, for the start-up banner; else empty.
    """

    num_blocks: int
    num_window_blocks: int = 0
    note: str = ""


def pool_size(
    config: EngineConfig, block: BlockBytes, model_context: int, *, reserved: int = 0
) -> PoolSize:
    """Return the number of blocks of the pool of a model that is loaded.

    reserved: bytes to leave for everything else.

    Raises:
        PoolTooLarge: the number of blocks that the operator has set does not fit.
        ModelLoadError: there is not enough memory for one request.
    """
    if not block.total:
        # All layers are recurrent: blocks only count tokens.
        enough = max(config.max_blocks or 0, -(-model_context // config.block_size))
        return PoolSize(config.num_blocks or enough)
    free = max(0, free_memory() - reserved)
    if config.num_blocks is not None:
        if (needed := block.of(config.num_blocks)) > free:
            raise PoolTooLarge(config.num_blocks, needed, free, block.num_within(free))
        return _size(config.num_blocks, block, int(_SHARE * free))
    least = -(-min(_MIN_TOKENS, model_context) // config.block_size)
    if config.max_blocks is None:
        budget = max(0, bytes_within(config.memory_fraction) - reserved)
        _check_room(least, block, budget, "a larger share of the memory")
        return _size(block.num_within(budget), block, budget)
    _check_room(least, block, free, "a smaller model, or a KV cache of 16 bits")
    budget = int(_SHARE * free)
    num_blocks = max(min(least, config.max_blocks), block.num_within(budget))
    if num_blocks >= config.max_blocks:
        return _size(config.max_blocks, block, budget)
    note = (
        f"; not {config.max_blocks}, which are {block.of(config.max_blocks) // MIB} MiB: "
        f"{free // MIB} MiB are free, and the pool takes half of them"
    )
    return _size(num_blocks, block, budget, note)


def _size(num_blocks: int, block: BlockBytes, budget: int, note: str = "") -> PoolSize:
    """Give layers with windows more blocks where that fits the budget in bytes."""
    roomy = block.roomy_window_blocks(num_blocks)
    fits = block.of(num_blocks, roomy) <= budget
    return PoolSize(num_blocks, roomy if fits else block.num_window_blocks(num_blocks), note)


def _check_room(least: int, block: BlockBytes, room: int, advice: str) -> None:
    if (needed := block.of(least)) > room:
        raise ModelLoadError(
            f"the least KV pool, {least} blocks, needs {-(-needed // MIB)} MiB, "
            f"and there is room for {room // MIB} MiB: take {advice}"
        )
