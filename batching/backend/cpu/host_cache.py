"""A KV pool of numpy arrays, for float32 on a CPU."""

from collections.abc import Sequence
from typing import Final

import mlx.core as mx
import numpy as np

from batching.backend.cpu.attention import Floats, HostAttention, HostPool
from batching.backend.cpu.pages import PoolPages, Region, lazy_zeros
from batching.backend.cpu.threads import make_numpy_single_threaded
from batching.backend.paged.kv_cache import (
    LayerCache,
    ModelCache,
    PagedKVCache,
    Slots,
    cache_leaves,
)
from batching.backend.paged.layout import LayerLayout, LayerShape
from batching.backend.paged.make_caches import make_caches
from batching.backend.paged.mlx_attention import SlidingWindow

# Below it, the products wait for the weights and not for the rows.
_MAX_UNPADDED: Final = 32


def host_cache(
    layers: Sequence[LayerLayout],
    num_blocks: int,
    block_size: int,
    *,
    num_window_blocks: int = 0,
    one_by_one: bool = False,
) -> PagedKVCache:
    make_numpy_single_threaded()
    caches = make_caches(
        layers,
        lambda shape, num_blocks: HostLayerCache(shape, num_blocks * block_size),
        num_blocks,
        block_size,
        num_window_blocks,
    )
    pages, window_pages = _pages(caches, num_blocks), _pages(caches, num_window_blocks, True)
    # Modules that take pieces of a step know of no padding.
    padded = _padded if all(isinstance(cache, HostLayerCache) for cache in caches) else int
    return PagedKVCache(
        caches,
        block_size,
        HostAttention,
        padded,
        on_use=(pages.use, window_pages.use),
        one_by_one=one_by_one,
    )


def _pages(caches: Sequence[ModelCache], num_blocks: int, is_windowed: bool = False) -> PoolPages:
    layers = [leaf for leaf in cache_leaves(caches) if isinstance(leaf, HostLayerCache)]
    arrays = [array for leaf in layers if leaf.is_windowed == is_windowed for array in leaf.pool]
    return PoolPages([Region.of(head) for array in arrays for head in array], arrays, num_blocks)


class HostLayerCache(LayerCache):
    """Evaluates the queries, keys and values of a layer, and computes the rest in numpy.

    A write is deferred until the first read, so that both need only one evaluation.
    """

    _written: tuple[mx.array, mx.array] | None

    def __init__(self, shape: LayerShape, num_slots: int) -> None:
        self.pool = HostPool(
            lazy_zeros((shape.num_heads, num_slots, shape.key_dim)),
            lazy_zeros((shape.num_heads, num_slots, shape.value_dim)),
        )
        super().__init__(shape, num_slots)

    def write(self, keys: mx.array, values: mx.array) -> None:
        self._written = (keys, values)

    def attend_within(
        self,
        queries: mx.array,
        scale: float,
        window: SlidingWindow | None,
        sinks: mx.array | None,
    ) -> mx.array:
        attention = self.step.attention
        assert isinstance(attention, HostAttention)
        mx.eval(queries, self._written or ())
        self.flush()
        output = attention.attend(
            _on_host(queries),
            self.pool,
            scale=scale,
            soft_cap=self.shape.soft_cap,
            window=window,
            sinks=None if sinks is None else np.array(sinks.astype(mx.float32)),
        )
        return mx.array(output[:, :, None])

    def flush(self) -> None:
        if self._written is None:
            return
        mx.eval(self._written)
        slots = self.step.slots
        for array, written in zip(self.pool, self._written, strict=True):
            array[:, slots] = _on_host(written)[: len(slots)].swapaxes(0, 1)
        self._written = None

    def copy(self, sources: Slots, targets: Slots) -> None:
        for array in self.pool:
            array[:, targets] = array[:, sources]

    def reset(self) -> None:
        """Drop a deferred write; no request reads slots of the pool before it has written them."""
        self._written = None


def _padded(num_tokens: int) -> int:
    """Return how many rows are computed soonest: 72 take 61 ms in OpenBLAS, and 69 take 70."""
    return num_tokens if num_tokens <= _MAX_UNPADDED else -(-num_tokens // 8) * 8


def _on_host(rows: mx.array) -> Floats:
    """`[T, H, 1, D]` to `[T, H, D]`, without a copy."""
    return np.asarray(rows)[:, :, 0]
