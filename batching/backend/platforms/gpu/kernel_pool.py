"""A KV pool that kernels of this project write to and read in decodes.

They write to the pool's arrays in place without MLX knowing: no array is donated or copied, even if the
next step is queued while one runs.  A token orders the kernels (see `PoolKernels`): each layer has one,
which passes through each write and each read, within a step and from step to step.
"""

from collections.abc import Sequence
from typing import Final

import mlx.core as mx
import numpy as np

from batching.backend.paged.block_bytes import arrays_of, bytes_of
from batching.backend.paged.kv_cache import LayerCache, PagedKVCache, Slots, slot_rows
from batching.backend.paged.latent_cache import LatentCache
from batching.backend.paged.layout import CacheLayout, LayerLayout, LayerShape
from batching.backend.paged.make_caches import make_caches
from batching.backend.paged.mlx_attention import GatheredContext, RunContext, SlidingWindow
from batching.backend.platforms.gpu.pool_kernels import KernelPool, PoolKernels
from batching.backend.platforms.gpu.rotations import rotated_alike
from batching.backend.platforms.gpu.step_rows import KernelAttention, padded, padded_slots
from batching.block_store.entry_file import Buffer

_TOKEN_SIZE: Final = 8


def kernel_cache(
    kernels: PoolKernels,
    layers: Sequence[LayerLayout],
    num_blocks: int,
    block_size: int,
    *,
    num_window_blocks: int = 0,
    one_by_one: bool = False,
) -> PagedKVCache:
    """Return an empty pool."""

    def make(shape: LayerShape, num_blocks: int) -> KernelLayerCache:
        kind = KernelLatentCache if shape.is_latent else KernelLayerCache
        return kind(kernels, shape, num_blocks, block_size)

    caches = make_caches(layers, make, num_blocks, block_size, num_window_blocks, make_latent=make)
    return PagedKVCache(caches, block_size, KernelAttention, one_by_one=one_by_one)


def why_not(kernels: PoolKernels, layout: CacheLayout) -> str:
    """Return why the pool of a model cannot be one of kernels; empty if it can."""
    shapes = [shape for shape in layout.shapes if not shape.is_gathered]
    if not shapes:
        return "no layer's attention is over keys and values that only the pool reads"
    return next(filter(None, map(kernels.why_not, shapes)), "")


class KernelLayerCache(LayerCache):
    """Defers its write until attention, so that one kernel can rotate queries and keys and write them."""

    takes_queued_steps = True

    _arrays: KernelPool
    _token: mx.array
    # Keys, and values unless they are in the keys, `[T, num_heads, 1, dim]`.
    _written: tuple[mx.array, ...] | None
    # The model's sinks, and the padded ones that the kernels take.
    _sinks: tuple[mx.array, mx.array] | None = None

    def __init__(
        self, kernels: PoolKernels, shape: LayerShape, num_blocks: int, block_size: int
    ) -> None:
        self._kernels = kernels
        self._block_size = block_size
        super().__init__(shape, num_blocks * block_size)

    @property
    def pool(self) -> tuple[mx.array, ...]:
        return self._arrays.arrays

    @property
    def state(self) -> tuple[mx.array, ...]:
        """Continue with other arrays of the same shapes; a deferred write is dropped."""
        return *self.pool, self._token

    @state.setter
    def state(self, arrays: tuple[mx.array, ...]) -> None:
        """Go on with others of the same shapes; what is not written yet is dropped."""
        *pool, self._token = arrays
        self._arrays = self._arrays._replace(arrays=tuple(pool))
        self._written = None

    def write(self, keys: mx.array, values: mx.array) -> None:
        self._written = keys, values

    def attend_within(
        self,
        queries: mx.array,
        scale: float,
        window: SlidingWindow | None,
        sinks: mx.array | None,
    ) -> mx.array:
        queries = self._write_with(queries)
        attention = self._attention
        # Reads of the pool wait for the writes alone, not for each other; the next write waits for all of them.
        written = self._token
        outputs: list[mx.array] = []
        start = attention.num_decoded
        if start:
            decoded, self._token = self._kernels.decode(
                queries[:start].squeeze(2),
                attention.decodes(window),
                self._arrays,
                written,
                scale=scale,
                soft_cap=self.shape.soft_cap,
                sinks=self._padded_sinks(sinks),
            )
            outputs.append(decoded[:, :, None])
        for chunk in attention.chunks(window, sees_ahead=self.shape.sees_ahead):
            stop = start + chunk.num_rows
            keys, values = self._gathered(chunk.context, written, queries.dtype)
            output = chunk.attend_to(
                queries[start:stop], keys, values, scale, self.shape.soft_cap, sinks
            )
            self._token = _after(self._token, output)
            outputs.append(output)
            start = stop
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def flush(self) -> None:
        if self._written is not None:
            rows = [array.squeeze(2) for array in self._written]
            self._written = None
            self._token = self._kernels.write(rows, self._slots, self._arrays, self._token)

    def copy(self, sources: Slots, targets: Slots) -> None:
        # All are read before one is written; with their scales they are not rounded once more.
        self._write_rows(self._rows(sources), targets)

    def export_block(self, slots: Slots) -> bytes:
        return bytes_of(self._rows(slots))

    def import_block(self, slots: Slots, data: Buffer) -> None:
        self._write_rows(arrays_of(data, self._rows(slots)), slots)

    def _rows(self, slots: Slots) -> list[mx.array]:
        """Return what slots hold after all kernels before, `[len(slots), num_heads, dim]` of each array."""
        at = slot_rows(slots, self.shape.num_heads, self.num_slots) + self._token[:1]
        return [array[at].reshape(len(slots), self.shape.num_heads, -1) for array in self.pool]

    def _write_rows(self, rows: Sequence[mx.array], slots: Slots) -> None:
        self._token = self._kernels.write(rows, padded_slots(slots), self._arrays, self._token)

    def reset(self) -> None:
        """Start over with new arrays, since steps in flight may still write to the old ones."""
        shape = self.shape
        self._written = None
        num_rows = shape.num_heads * self.num_slots
        dims = (shape.key_dim,) if shape.is_latent else (shape.key_dim, shape.value_dim)
        scales = [mx.zeros(num_rows) for _ in dims] if shape.dtype == mx.int8 else []
        self._arrays = KernelPool(
            (*(mx.zeros((num_rows, dim), shape.dtype) for dim in dims), *scales),
            shape.num_heads,
            shape.latent_dim or shape.value_dim,
            self._block_size,
        )
        self._token = mx.zeros(_TOKEN_SIZE, mx.uint32)

    def _gathered(
        self, context: RunContext | GatheredContext, after: mx.array, dtype: mx.Dtype
    ) -> tuple[mx.array, mx.array]:
        """Return keys and values of a chunk, read after the kernels that a token comes from.

        dtype: what those of 8 bits become.
        """
        assert isinstance(context, GatheredContext), "nothing would wait where nothing is copied"
        heads, slots = self.shape.num_heads, self.num_slots
        read = [context.read(array.reshape(heads, slots, -1), after) for array in self.pool]
        if self._arrays.is_quantized:
            keys, values, key_scales, value_scales = read
            # In float32, as where the decodes multiply.
            return (keys * key_scales).astype(dtype), (values * value_scales).astype(dtype)
        return read[0], read[-1][..., : self._arrays.value_dim]

    def _write_with(self, queries: mx.array) -> mx.array:
        """Write what is put off; return the queries, `[T, num_query_heads, 1, key_dim]`, rotated."""
        if (
            self._written is None
            # MLX rotates what is rounded: see docs/architecture/backend.md.
            or self._arrays.is_quantized
            or (made := rotated_alike(queries, self._written[0], self.step.positions)) is None
        ):
            self.flush()
            return queries
        values, self._written = self._written[1], None
        rotated, self._token = self._kernels.rotate_and_write(
            made.queries.squeeze(2),
            made.keys.squeeze(2),
            values.squeeze(2),
            made.rotation,
            made.norms,
            self._attention.positions(self.step.positions),
            self._slots,
            self._arrays,
            self._token,
        )
        return rotated[:, :, None]

    def _padded_sinks(self, sinks: mx.array | None) -> mx.array | None:
        """Return sinks as the kernels take them, made once."""
        if sinks is None:
            return None
        if self._sinks is None or self._sinks[0] is not sinks:
            self._sinks = sinks, mx.array(padded(np.array(sinks.astype(mx.float32)), 0))
        return self._sinks[1]

    @property
    def _attention(self) -> KernelAttention:
        attention = self.step.attention
        assert isinstance(attention, KernelAttention)
        return attention

    @property
    def _slots(self) -> mx.array:
        return self._attention.slots(self.step.slots)


class KernelLatentCache(LatentCache, KernelLayerCache):
    """Keys of one head, whose first numbers are the values."""

    def write(self, keys: mx.array, values: mx.array) -> None:
        self._written = (keys,)

    def attend_both(self, queries: mx.array) -> mx.array:
        return self.attend_within(queries, 1.0, None, None)


def _after(token: mx.array, output: mx.array) -> mx.array:
    """Return the token, made by a kernel that reads an output, too: 0 is less than anything.

    output: `[L, num_heads, 1, dim]`, of which one number or two are read.
    """
    size = mx.uint32.size // output.dtype.size
    return mx.minimum(token, output[0, 0, 0, :size].view(mx.uint32))
