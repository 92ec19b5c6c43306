"""A KV pool of MLX arrays, on any device."""

from collections.abc import Sequence
from functools import partial

import mlx.core as mx

from batching.backend.paged.block_bytes import arrays_of, bytes_of
from batching.backend.paged.kv_cache import LayerCache, PagedKVCache, Slots, slot_rows
from batching.backend.paged.layout import LayerLayout
from batching.backend.paged.make_caches import make_caches
from batching.backend.paged.mlx_attention import Pool, SlidingWindow, StepAttention
from batching.block_store.entry_file import Buffer


def device_cache(
    layers: Sequence[LayerLayout],
    num_blocks: int,
    block_size: int,
    *,
    num_window_blocks: int = 0,
    one_by_one: bool = False,
    views_decodes: bool = True,
) -> PagedKVCache:
    """Return an empty pool.

    views_decodes: a decode may attend to a view of the pool; else its context is gathered.
    """
    caches = make_caches(
        layers,
        lambda shape, num_blocks: DeviceLayerCache(shape, num_blocks * block_size),
        num_blocks,
        block_size,
        num_window_blocks,
    )
    attention = partial(StepAttention, views_decodes=views_decodes)
    return PagedKVCache(caches, block_size, attention, one_by_one=one_by_one)


class DeviceLayerCache(LayerCache):
    """Writes in place: the pool's arrays have no other reference while a step is built.

    They are `[num_heads * num_slots, dim]`, so that one index of a row takes a step's keys as the model has
    made them: an index for heads and one for slots would be made, and the keys transposed, for each write.
    """

    _arrays: tuple[mx.array, mx.array]

    @property
    def pool(self) -> Pool:
        heads, slots = self.shape.num_heads, self.num_slots
        return Pool(*(array.reshape(heads, slots, array.shape[-1]) for array in self._arrays))

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        return self._arrays

    def write(self, keys: mx.array, values: mx.array) -> None:
        rows = self.step.slot_rows(self.shape.num_heads, self.num_slots)
        for array, new in zip(self._arrays, (keys, values), strict=True):
            array[rows] = new.reshape(-1, array.shape[-1])

    def attend_within(
        self,
        queries: mx.array,
        scale: float,
        window: SlidingWindow | None,
        sinks: mx.array | None,
    ) -> mx.array:
        attention = self.step.attention
        assert isinstance(attention, StepAttention)
        return attention.attend(
            queries,
            self.pool,
            scale=scale,
            soft_cap=self.shape.soft_cap,
            window=window,
            sinks=sinks,
            sees_ahead=self.shape.sees_ahead,
        )

    def flush(self) -> None:
        """Nothing to do: the writes are in the graph that is evaluated with `state`."""

    def copy(self, sources: Slots, targets: Slots) -> None:
        sizes = self.shape.num_heads, self.num_slots
        for array in self._arrays:
            array[slot_rows(targets, *sizes)] = array[slot_rows(sources, *sizes)]

    def export_block(self, slots: Slots) -> bytes:
        return bytes_of(self._rows(slots))

    def import_block(self, slots: Slots, data: Buffer) -> None:
        rows = slot_rows(slots, self.shape.num_heads, self.num_slots)
        for array, new in zip(self._arrays, arrays_of(data, self._rows(slots)), strict=True):
            array[rows] = new

    def _rows(self, slots: Slots) -> list[mx.array]:
        rows = slot_rows(slots, self.shape.num_heads, self.num_slots)
        return [array[rows] for array in self._arrays]

    def reset(self) -> None:
        num_rows, dtype = self.shape.num_heads * self.num_slots, self.shape.dtype
        self._arrays = (
            mx.zeros((num_rows, self.shape.key_dim), dtype),
            mx.zeros((num_rows, self.shape.value_dim), dtype),
        )
