"""Decides how many requests, blocks and states a model has room for."""

from dataclasses import dataclass, replace

from batching.backend.memory.device import MIB
from batching.backend.memory.pool_size import BlockBytes, least_window_blocks, pool_size
from batching.backend.memory.state_size import StateSize, state_size
from batching.backend.paged.layout import CacheLayout
from batching.backend.self_check.checked_model import CheckedModel
from batching.backend.weights.storage import dtype_name
from batching.config import EngineConfig, SchedulerConfig


@dataclass(frozen=True)
class Sizes:
    """The limits within which a model is served.

    limits: the scheduler's limits, within which the executor is right.
    block: the bytes of a block in it.
    states: bytes of recurrent states.
    note, states_note: for the start-up banner; empty if there is nothing to say.
    """

    limits: SchedulerConfig
    layout: CacheLayout
    block: BlockBytes
    states: int
    note: str = ""
    states_note: str = ""

    @property
    def kv_cache(self) -> int:
        """The bytes of the pool."""
        return self.block.of(self.limits.num_blocks, self.limits.num_window_blocks)

    @property
    def pool_line(self) -> str:
        """A line of the start-up banner."""
        return "; ".join(filter(None, [self._pool, self.states_note]))

    @property
    def _pool(self) -> str:
        limits, layout = self.limits, self.layout
        prefix_cache = f"prefix cache {'on' if limits.enable_prefix_cache else 'off'}{self.note}"
        if not layout.shapes:
            return f"no keys and values, {prefix_cache}"
        in_windows = limits.num_window_blocks
        windows = f", {in_windows} in windows of {layout.window}" if in_windows else ""
        dtype = " and ".join(map(dtype_name, layout.dtypes))
        return (
            f"{limits.num_blocks} blocks of {limits.block_size} tokens{windows} "
            f"({self.kv_cache // MIB} MiB, {dtype}), {prefix_cache}"
        )


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
    return Sizes(limits, layout, block, states.num_bytes, size.note, states.note)


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
