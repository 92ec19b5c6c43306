"""Estimates the memory that a model needs, from its files and the configuration of its engine."""

from dataclasses import dataclass
from typing import Final

from batching.config import EngineConfig
from batching.fit.block_bytes import POOL_SHARE, BlockBytes, least_blocks, least_window_blocks
from batching.fit.caches import kept_of
from batching.fit.kept import Kept
from batching.fit.weights import Compute, adapter_bytes, num_adapted, weight_bytes
from batching.model_files.description import ModelDescription
from batching.model_files.model_types import ENCODER_TYPES

# What Python, MLX, the tokenizer and the arrays of a step take beside weights and pool.
_OTHER_BYTES: Final = 256 << 20
# A running request has its state, the new one that a step makes, and the one at its last full block.
STATES_EACH: Final = 3
_KV_BYTES: Final = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The memory that a model needs, in bytes.  What the pool takes is None where the config does not tell.

    weights: once they are loaded.
    overhead: of the process and of loading, beside that.
    kv_bytes_per_token: keys and values of all layers.
    states: the recurrent states of one running request.
    adapters: the slots of adapters.
    least_blocks, least_pool: the smallest pool that the server makes by itself.
    wanted_blocks, wanted_pool: the pool that it makes where memory allows.
    """

    weights: int
    overhead: int
    kv_bytes_per_token: int | None
    states: int | None
    least_blocks: int
    least_pool: int | None
    wanted_blocks: int
    wanted_pool: int | None
    block: BlockBytes | None = None
    adapters: int = 0

    @property
    def least(self) -> int:
        """The least bytes with which the model can be served; without the pool where that is unknown."""
        return self._fixed + (self.least_pool or 0)

    @property
    def wanted(self) -> int:
        """The bytes with a whole pool, and states of one request."""
        return self._fixed + (self.wanted_pool or 0)

    @property
    def _fixed(self) -> int:
        return self.weights + self.overhead + (self.states or 0) + self.adapters

    @property
    def is_complete(self) -> bool:
        """Whether the config tells what the model keeps of a request."""
        return self.kv_bytes_per_token is not None

    def num_blocks_within(self, memory: int) -> int:
        """Return how many blocks the pool gets with so much memory: at most half of what the weights leave."""
        if self.block is None or not self.block.total:
            return self.wanted_blocks
        left = max(0, memory - self._fixed)
        within = max(self.least_blocks, self.block.num_within(int(POOL_SHARE * left)))
        return min(self.wanted_blocks, within)


def estimate(model: ModelDescription, config: EngineConfig, compute: Compute) -> MemoryEstimate:
    """Estimate what a model needs if it is loaded with a configuration."""
    is_encoder = model.model_type in ENCODER_TYPES and compute is not Compute.STORED
    weights = weight_bytes(model, compute, "float32" if is_encoder else config.dtype)
    overhead = _OTHER_BYTES + weights // max(1, model.num_layers or 1)
    adapters = 0
    if config.max_adapters and not is_encoder:
        adapters = config.max_adapters * adapter_bytes(num_adapted(model), config.max_adapter_rank)
    context = config.model_context(model.context)
    enough = least_blocks(context, config.block_size)
    wanted = config.num_blocks or config.max_blocks or enough
    # A number that is set is needed whole.
    least = wanted if config.num_blocks else min(enough, wanted)
    kept = kept_of(model.config)
    if kept is None:
        return MemoryEstimate(
            weights, overhead, None, None, least, None, wanted, None, adapters=adapters
        )
    kv_bytes = kv_bytes_of(config, compute, kept), 2 if compute is Compute.STORED else 4
    block = _block_bytes(kept, config, *kv_bytes)
    return MemoryEstimate(
        weights,
        overhead,
        kept.bytes_per_token(*kv_bytes),
        STATES_EACH * kept.state_bytes,
        least,
        block.of(least),
        wanted,
        block.of(wanted),
        block,
        adapters,
    )


def kv_bytes_of(config: EngineConfig, compute: Compute, kept: Kept) -> int:
    """Return the bytes of a number among keys and values; 1 is 8 bits with scales."""
    if (size := _KV_BYTES.get(config.kv_cache_dtype)) is not None:
        return size
    if compute is Compute.STORED:
        return 4 if config.dtype == "float32" else 2
    if compute is Compute.FLOATS:
        return 2 if config.dtype in ("bfloat16", "float16") else 4
    # What a model's own code reads is not rounded.
    return 4 if config.cpu_precision == "exact" or kept.is_gathered else 2


def _block_bytes(kept: Kept, config: EngineConfig, kv_bytes: int, full_bytes: int) -> BlockBytes:
    """Return the bytes of a block, with the fewest blocks of layers with windows."""
    total = config.block_size * kept.bytes_per_token(kv_bytes, full_bytes)
    windowed = config.block_size * kept.window_bytes_per_token(kv_bytes, full_bytes)
    if kept.window is None:
        return BlockBytes(total)
    limits = config.scheduler_config(1, config.model_context(None))
    return BlockBytes(total, windowed, least_window_blocks(limits, kept.window))
