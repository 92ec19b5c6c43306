"""How many blocks the KV pool has."""

from dataclasses import dataclass
from typing import Final

from batching.backend.memory.device import MIB, bytes_within, free_memory
from batching.config import EngineConfig
from batching.errors import ModelLoadError, PoolTooLarge

# Of the memory that is free once the model is loaded; the rest is for activations, for what
# else this process does, and for its neighbours.
_SHARE: Final = 0.5
# A pool that the server sizes by itself has room for one request of so many tokens.
_MIN_TOKENS: Final = 1024


@dataclass(frozen=True, slots=True)
class PoolSize:
    """note: why these are fewer blocks than the ceiling; else empty."""

    num_blocks: int
    note: str = ""


def pool_size(
    config: EngineConfig, bytes_per_block: int, model_context: int, *, reserved: int = 0
) -> PoolSize:
    """Return how many blocks the pool of a loaded model has, beside `reserved` bytes for all else.

    Raises:
        PoolTooLarge: so many blocks as the operator has set do not fit.
        ModelLoadError: there is no room for one request.
    """
    if not bytes_per_block:
        # All layers are recurrent: blocks only count tokens.
        enough = max(config.max_blocks or 0, -(-model_context // config.block_size))
        return PoolSize(config.num_blocks or enough)
    free = max(0, free_memory() - reserved)
    if config.num_blocks is not None:
        if config.num_blocks * bytes_per_block > free:
            raise PoolTooLarge(config.num_blocks, bytes_per_block, free)
        return PoolSize(config.num_blocks)
    least = -(-min(_MIN_TOKENS, model_context) // config.block_size)
    if config.max_blocks is None:
        budget = max(0, bytes_within(config.memory_fraction) - reserved)
        _check_room(least, bytes_per_block, budget, "a larger share of the memory")
        return PoolSize(budget // bytes_per_block)
    _check_room(least, bytes_per_block, free, "a smaller model, or a KV cache of 16 bits")
    num_blocks = max(min(least, config.max_blocks), int(_SHARE * free) // bytes_per_block)
    if num_blocks >= config.max_blocks:
        return PoolSize(config.max_blocks)
    return PoolSize(
        num_blocks,
        f"; not {config.max_blocks}, which are {config.max_blocks * bytes_per_block // MIB} MiB: "
        f"{free // MIB} MiB are free, and the pool takes half of them",
    )


def _check_room(least: int, bytes_per_block: int, room: int, advice: str) -> None:
    if least * bytes_per_block > room:
        raise ModelLoadError(
            f"the least KV pool, {least} blocks, needs {-(-least * bytes_per_block // MIB)} MiB, "
            f"and there is room for {room // MIB} MiB: take {advice}"
        )
