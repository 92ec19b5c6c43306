"""A KV pool of MLX arrays, on any device."""

from collections.abc import Iterable

import mlx.core as mx

from batching.backend.paged.kv_cache import LayerCache, LayerShape, PagedKVCache, Slots
from batching.backend.paged.mlx_attention import Pool, SlidingWindow, StepAttention


def device_cache(shapes: Iterable[LayerShape], num_blocks: int, block_size: int) -> PagedKVCache:
    layers = [DeviceLayerCache(shape, num_blocks * block_size) for shape in shapes]
    return PagedKVCache(layers, block_size, StepAttention)


class DeviceLayerCache(LayerCache):
    """Writes in place: the pool's arrays have no other reference while a step is built."""

    pool: Pool

    @property
    def state(self) -> Pool:
        return self.pool

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        slots = mx.array(self.step.slots)
        self.pool.keys[:, slots] = keys.squeeze(2).swapaxes(0, 1)
        self.pool.values[:, slots] = values.squeeze(2).swapaxes(0, 1)
        return keys, values

    def attend_within(
        self,
        queries: mx.array,
        scale: float,
        window: SlidingWindow | None,
        sinks: mx.array | None,
    ) -> mx.array:
        attention = self.step.attention
        assert isinstance(attention, StepAttention)
        return attention.attend(queries, self.pool, scale=scale, window=window, sinks=sinks)

    def flush(self) -> None:
        """Nothing to do: the writes are in the graph that is evaluated with `state`."""

    def copy(self, sources: Slots, targets: Slots) -> None:
        for array in self.pool:
            array[:, mx.array(targets)] = array[:, mx.array(sources)]

    def reset(self) -> None:
        heads, slots, dtype = self.shape.num_heads, self.num_slots, self.shape.dtype
        self.pool = Pool(
            mx.zeros((heads, slots, self.shape.key_dim), dtype),
            mx.zeros((heads, slots, self.shape.value_dim), dtype),
        )
