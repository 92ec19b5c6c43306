"""The KV pool of the native kernels, read in place through the block tables."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from batching.backend.paged.block_bytes import WrongBlock
from batching.backend.paged.kv_cache import (
    CopyLayers,
    LayerCache,
    ModelCache,
    PagedKVCache,
    Slots,
    StepInputs,
    cache_leaves,
    copy_each,
)
from batching.backend.paged.latent_cache import LatentCache
from batching.backend.paged.layout import LayerLayout, LayerShape
from batching.backend.paged.make_caches import make_caches
from batching.backend.paged.mlx_attention import SlidingWindow
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.platforms.cpu.pools.pages import PoolPages, Region
from batching.backend.platforms.cpu.pools.states import NativeStates, StateCells
from batching.block_store.entry_file import Buffer
from batching.inputs.images import Span
from batching.steps.step_plan import Slice

# Bits of a number in the pool; other types become float32.
_BITS: Final = {mx.bfloat16: 16, mx.int8: 8}


def native_cache(
    native: Native,
    layers: Sequence[LayerLayout],
    num_blocks: int,
    block_size: int,
    *,
    num_window_blocks: int = 0,
    one_by_one: bool = False,
    rounds_inputs: bool = False,
) -> PagedKVCache:
    """Return an empty pool; with `rounds_inputs` attention may round to 16 bits."""

    def make(shape: LayerShape, num_blocks: int) -> NativeLayerCache:
        return layer_cache(native, shape, num_blocks, block_size, rounds_inputs=rounds_inputs)

    caches = make_caches(
        layers,
        make,
        num_blocks,
        block_size,
        num_window_blocks,
        make_latent=make,
        make_states=_make_states(native),
    )
    pages = _pages(native, caches, num_blocks)
    window_pages = _pages(native, caches, num_window_blocks, is_windowed=True)
    return PagedKVCache(
        caches,
        block_size,
        lambda slices, size: NativeAttention(native, slices, size),
        on_use=(pages.use, window_pages.use),
        copy_layers=_copy_layers(native, block_size),
        one_by_one=one_by_one,
    )


def layer_cache(
    native: Native,
    shape: LayerShape,
    num_blocks: int,
    block_size: int,
    *,
    rounds_inputs: bool = False,
) -> "NativeLayerCache":
    kind = NativeLatentCache if shape.is_latent else NativeLayerCache
    return kind(native, shape, num_blocks, block_size, rounds_inputs=rounds_inputs)


def _make_states(native: Native) -> Callable[[int], NativeStates]:
    cells, count = StateCells(native), itertools.count()
    return lambda num_arrays: NativeStates(num_arrays, cells, is_first=next(count) == 0)


def _copy_layers(native: Native, block_size: int) -> CopyLayers:
    """Return what copies blocks in the kernels' pools of all layers by one call.

    It does so without the interpreter's lock, for which each call has to wait in the end.
    """

    def copy(layers: Sequence[LayerCache], sources: Slots, targets: Slots) -> None:
        pools = [layer.pool for layer in layers if isinstance(layer, NativeLayerCache)]
        native.module.copy_blocks(pools, *_block_ids(block_size, sources, targets))
        gathered = [layer for layer in layers if not isinstance(layer, NativeLayerCache)]
        copy_each(gathered, sources, targets)

    return copy


def _block_ids(block_size: int, *slots: Slots) -> Iterator[npt.NDArray[np.int32]]:
    """Return the blocks of slots, which are all of a block's, one block after the other."""
    return ((each[::block_size] // block_size).astype(np.int32) for each in slots)


def _pages(
    native: Native, caches: Sequence[ModelCache], num_blocks: int, *, is_windowed: bool = False
) -> PoolPages:
    layers = [leaf for leaf in cache_leaves(caches) if isinstance(leaf, NativeLayerCache)]
    pools = [leaf.pool for leaf in layers if leaf.is_windowed == is_windowed]
    regions = [Region(*region) for pool in pools for region in pool.regions]
    return PoolPages(regions, pools, num_blocks, native.nodes)


class NativeAttention:
    """The rows of one step, as the kernels read them.

    They begin before the window, at a span of blocks, and hide what they read there.
    """

    def __init__(
        self,
        native: Native,
        slices: Sequence[Slice],
        block_size: int,
        *,
        is_windowed: bool = False,
    ) -> None:
        self.slices = list(slices)
        self._native = native
        self._block_size = block_size
        self._is_windowed = is_windowed
        self._has_spans = any(s.spans for s in slices)
        self._steps: dict[bool, object] = {}

    def windowed(self) -> "NativeAttention":
        return NativeAttention(self._native, self.slices, self._block_size, is_windowed=True)

    def _rows(self, *, sees_ahead: bool) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        rows: list[tuple[int, int, int, int, int]] = []
        tables: list[int] = []
        row = 0
        for s in self.slices:
            first = row - s.start
            for start, stop, until in _parts(s, s.spans if sees_ahead else ()):
                rows.append((first + start, stop - start, start, len(tables), until))
            table = s.table(is_windowed=self._is_windowed)
            tables += table.block_ids[: -(-s.stop // self._block_size)]
            row += len(s)
        return np.array(rows, np.int32).reshape(-1, 5), np.array(tables, np.int32)

    def step(self, slots: Slots, *, sees_ahead: bool = False) -> object:
        """Return the step of the kernels; the rows' keys and values are written to `slots`.

        sees_ahead: rows of a span see each other.
        """
        key = sees_ahead and self._has_spans
        if key not in self._steps:
            rows = self._rows(sees_ahead=key)
            self._steps[key] = self._native.module.step(*rows, slots.astype(np.int32))
        return self._steps[key]


def _parts(s: Slice, spans: Sequence[Span]) -> Iterator[tuple[int, int, int]]:
    """Yield positions `[start, stop)` of a slice, and until where all of them see; 0 is nothing ahead."""
    at = s.start
    for span in spans:
        if at < span.start:
            yield at, span.start, 0
        yield span.start, span.stop, span.stop
        at = span.stop
    if at < s.stop:
        yield at, s.stop, 0


class NativeLayerCache(LayerCache):
    """Defers writes until attention, so that both are one operation."""

    takes_queued_steps = True

    def __init__(
        self,
        native: Native,
        shape: LayerShape,
        num_blocks: int,
        block_size: int,
        *,
        rounds_inputs: bool = False,
    ) -> None:
        self._native = native
        self._block_size = block_size
        self._written: tuple[mx.array, mx.array] | None = None
        self._is_pending = False
        # The output of the operation that writes.
        self._attended: mx.array | None = None
        self.pool = native.module.pool(
            num_blocks,
            block_size,
            shape.num_heads,
            shape.key_dim,
            shape.latent_dim or shape.value_dim,
            _BITS.get(shape.dtype, 32),
            rounds_inputs,
            shape.is_latent,
        )
        super().__init__(shape, num_blocks * block_size)

    def begin(self, step: StepInputs) -> None:
        super().begin(step)
        self._attended = None

    @property
    def state(self) -> tuple[mx.array, ...]:
        """The arrays whose evaluation writes to the pool, even if no logits are needed."""
        return () if self._attended is None else (self._attended,)

    def write(self, keys: mx.array, values: mx.array) -> None:
        self._written, self._is_pending = (keys, values), True

    def attend_within(
        self,
        queries: mx.array,
        scale: float,
        window: SlidingWindow | None,
        sinks: mx.array | None,
    ) -> mx.array:
        assert self._written is not None, "a layer writes before it attends"
        self._attended = self._native.module.attend(
            queries,
            *self._written,
            self.pool,
            self._native_step(),
            scale,
            window.size if window else 0,
            self.shape.soft_cap,
            sinks,
            window is not None and window.is_chunked,
        )
        self._is_pending = False
        if not self.shape.is_shared:
            # Other layers that read them write the same once more.
            self._written = None
        return self._attended

    def run_attention(
        self, run: Callable[[object, object, SlidingWindow], mx.array], mask: object
    ) -> mx.array:
        """Run what writes and attends, given pool, step and window; one of size 0 is none."""
        window = self.window(mask) or SlidingWindow(0)
        self._attended = run(self.pool, self._native_step(), window)
        return self._attended

    def _native_step(self) -> object:
        """Return what the kernels are given of the step."""
        attention = self.step.attention
        assert isinstance(attention, NativeAttention)
        return attention.step(self.step.slots, sees_ahead=self.shape.sees_ahead)

    def flush(self) -> None:
        if self._written is not None and self._is_pending:
            keys, _ = self._written
            self.attend_within(mx.zeros(keys.shape), 1.0, None, None)
        self._written = None

    def copy(self, sources: Slots, targets: Slots) -> None:
        blocks = _block_ids(self._block_size, sources, targets)
        self._native.module.copy_blocks([self.pool], *blocks)

    def export_block(self, slots: Slots) -> bytes:
        return b"".join(part.read() for part in self._parts(slots))

    def import_block(self, slots: Slots, data: Buffer) -> None:
        parts = list(self._parts(slots))
        if len(data) != (expected := sum(part.size for part in parts)):
            raise WrongBlock(f"a block of this layer has {expected} bytes, not {len(data)}")
        for part in parts:
            part.write(data[: part.size])
            data = data[part.size :]

    def _parts(self, slots: Slots) -> Iterator[Region]:
        """Return the memory of a block, which no operation uses."""
        block, num_blocks = int(slots[0]) // self._block_size, self.num_slots // self._block_size
        for address, size in self.pool.regions:
            yield Region(address + block * (size // num_blocks), size // num_blocks)

    def reset(self) -> None:
        """Drop a deferred write; no request reads slots of the pool before it has written them."""
        self._written = self._attended = None


class NativeLatentCache(LatentCache, NativeLayerCache):
    """Keys of one head, of which the first numbers are the values, too."""

    def attend_both(self, queries: mx.array) -> mx.array:
        return self.attend_within(queries, 1.0, None, None)
