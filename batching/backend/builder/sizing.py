"""Decides how many requests, blocks and states a model has room for."""

from dataclasses import dataclass, replace

from batching.backend.memory.device import MIB
from batching.backend.memory.pool_size import BlockBytes, PoolSize, least_window_blocks, pool_size
from batching.backend.memory.state_size import StateSize, state_size
from batching.backend.paged.layout import CacheLayout
from batching.backend.self_check.checked_model import CheckedModel
from batching.backend.weights.storage import dtype_name
from batching.config import EngineConfig, SchedulerConfig


@dataclass(frozen=True)
class Sizes:
    """The limits within which a model is served.

    limits: the scheduler's limits, within which the executor is right.
    pool_line: a line of the start-up banner.
    kv_cache, states: bytes of the pool, and of recurrent states.
    """

    limits: SchedulerConfig
    pool_line: str
    kv_cache: int
    states: int


def sizes_of(
    config: EngineConfig,
    checked: CheckedModel,
    declared: int | None,
    weights: int,
    max_span: int = 0,
    adapters: int = 0,
) -> Sizes:
    """Return how much of the free memory the pool and the states of a model take.

    weights: the bytes of the model's weights.
    declared: the context length in tokens that the model declares; None if it declares none.
    max_span: the most tokens that no step may cut.
    adapters: the bytes of the slots of adapters, which are empty yet.

    Raises:
        ModelLoadError: there is not enough memory for one request, or for a size that is set.
    """
    layout = checked.layout
    context = config.model_context(declared)
    longest = min(config.max_model_len or context, context)
    states = state_size(config, layout.state_bytes(longest), has_state=layout.has_state)
    limits = replace(_limits(config, checked, context, states), max_span=max_span)
    block = _block_bytes(layout, limits)
    granted = None if config.memory_budget is None else config.memory_budget - weights
    size = pool_size(config, block, context, reserved=states.num_bytes + adapters, granted=granted)
    limits = replace(
        limits,
        num_blocks=size.num_blocks,
        window=layout.window if size.num_window_blocks else None,
        num_window_blocks=size.num_window_blocks,
    )
    pool_line = _pool_line(limits, layout, size, block)
    return Sizes(
        limits,
        "; ".join(filter(None, [pool_line, states.note])),
        block.of(size.num_blocks, size.num_window_blocks),
        states.num_bytes,
    )


def _limits(
    config: EngineConfig, checked: CheckedModel, context: int, states: StateSize
) -> SchedulerConfig:
    """Return the limits of a pool of one block."""
    limits = replace(
        config.scheduler_config(1, context),
        max_num_seqs=states.num_running,
        num_checkpoints=states.num_checkpoints,
        min_copied_tokens=checked.platform.min_copied_tokens,
    )
    # Where a request has caches of its own, a wrong draft would cost a copy of all that it keeps.
    return replace(limits, max_draft_tokens=0) if checked.layout.has_own else limits


def _block_bytes(layout: CacheLayout, limits: SchedulerConfig) -> BlockBytes:
    total, windowed = layout.bytes_per_token, layout.window_bytes_per_token
    least_windowed = 0 if layout.window is None else least_window_blocks(limits, layout.window)
    return BlockBytes(limits.block_size * total, limits.block_size * windowed, least_windowed)


def _pool_line(
    limits: SchedulerConfig, layout: CacheLayout, size: PoolSize, block: BlockBytes
) -> str:
    prefix_cache = f"prefix cache {'on' if limits.enable_prefix_cache else 'off'}{size.note}"
    if not layout.shapes:
        return f"no keys and values, {prefix_cache}"
    in_windows = size.num_window_blocks
    windows = f", {in_windows} in windows of {layout.window}" if in_windows else ""
    num_mib = block.of(size.num_blocks, in_windows) // MIB
    dtype = " and ".join(map(dtype_name, layout.dtypes))
    return (
        f"{size.num_blocks} blocks of {limits.block_size} tokens{windows} ({num_mib} MiB, {dtype}), "
        f"{prefix_cache}"
    )
