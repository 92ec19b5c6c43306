"""Calculates the number of blocks of the KV pool."""

from dataclasses import dataclass

from batching.backend.memory.device import MIB, bytes_within, free_memory
from batching.config import EngineConfig
from batching.errors import ModelLoadError, PoolTooLarge
from batching.fit.block_bytes import (
    POOL_SHARE,
    BlockBytes as BlockBytes,
    least_blocks,
    least_window_blocks as least_window_blocks,
)


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
    config: EngineConfig,
    block: BlockBytes,
    model_context: int,
    *,
    reserved: int = 0,
    granted: int | None = None,
) -> PoolSize:
    """Return the number of blocks of the pool of a model that is loaded.

    reserved: bytes to leave for everything else.
    granted: the bytes that other models leave to this pool, though never less than the least pool; None is
        what is free.

    Raises:
        PoolTooLarge: the number of blocks that the operator has set does not fit.
        ModelLoadError: there is not enough memory for one request.
    """
    if not block.total:
        # All layers are recurrent: blocks only count tokens.
        enough = max(config.max_blocks or 0, -(-model_context // config.block_size))
        return PoolSize(config.num_blocks or enough)
    free = max(0, free_memory() - reserved)
    least = least_blocks(model_context, config.block_size)
    if granted is not None:
        free = min(free, max(granted - reserved, block.of(config.num_blocks or least)))
    if config.num_blocks is not None:
        if (needed := block.of(config.num_blocks)) > free:
            raise PoolTooLarge(config.num_blocks, needed, free, block.num_within(free))
        return _size(config.num_blocks, block, int(POOL_SHARE * free))
    if config.max_blocks is None:
        share = max(0, bytes_within(config.memory_fraction) - reserved)
        budget = share if granted is None else free
        _check_room(least, block, budget, "a larger share of the memory")
        return _size(block.num_within(budget), block, budget)
    _check_room(least, block, free, "a smaller model, or a KV cache of 16 bits")
    budget = int(POOL_SHARE * free)
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
