"""A KV pool of numpy arrays, for float32 on a CPU."""

import math
import mmap
from collections.abc import Iterable

import mlx.core as mx
import numpy as np

from batching.backend.attention import SlidingWindow
from batching.backend.cpu.attention import Floats, HostAttention, HostPool
from batching.backend.cpu.threads import make_numpy_single_threaded
from batching.backend.paged_cache import LayerCache, LayerShape, PagedKVCache, Slots


def host_cache(shapes: Iterable[LayerShape], num_blocks: int, block_size: int) -> PagedKVCache:
    make_numpy_single_threaded()
    layers = [HostLayerCache(shape, num_blocks * block_size) for shape in shapes]
    return PagedKVCache(layers, block_size, HostAttention)


class HostLayerCache(LayerCache):
    """Evaluates the queries, keys and values of a layer and goes on from there in numpy.

    A write waits for the first read, so that both need one evaluation.
    """

    pool: HostPool
    _written: tuple[mx.array, mx.array] | None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._written = (keys, values)
        return keys, values

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
            window=window,
            sinks=None if sinks is None else np.array(sinks.astype(mx.float32)),
        )
        return mx.array(output[:, :, None])

    def flush(self) -> None:
        if self._written is None:
            return
        mx.eval(self._written)
        keys, values = self._written
        self.pool.keys[:, self.step.slots] = _on_host(keys).swapaxes(0, 1)
        self.pool.values[:, self.step.slots] = _on_host(values).swapaxes(0, 1)
        self._written = None

    def copy(self, sources: Slots, targets: Slots) -> None:
        for array in self.pool:
            array[:, targets] = array[:, sources]

    def reset(self) -> None:
        heads, slots = self.shape.num_heads, self.num_slots
        self.pool = HostPool(
            _untouched((heads, slots, self.shape.key_dim)),
            _untouched((heads, slots, self.shape.value_dim)),
        )
        self._written = None


def _untouched(shape: tuple[int, ...]) -> Floats:
    """Return zeros of memory that the system clears as it is touched: starting costs nothing.

    `numpy.zeros` clears what the allocator kept, page by page.
    """
    memory = mmap.mmap(-1, math.prod(shape) * np.dtype(np.float32).itemsize)
    return np.frombuffer(memory, np.float32).reshape(shape)


def _on_host(rows: mx.array) -> Floats:
    """`[T, H, 1, D]` to `[T, H, D]`, without a copy."""
    return np.asarray(rows)[:, :, 0]
