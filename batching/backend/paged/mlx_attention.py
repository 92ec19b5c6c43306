"""Attention of one step's rows over the paged pool: the seam that a kernel can replace.

The portable means, and when each is the cheapest (one layer of 9 query and 3 key heads of
64, float32, 2 cores, milliseconds):

    rows x tokens     dense   views   gather by block   gather by slot
        1 x  128      0.08     0.08       0.09              0.23
       16 x  128      0.37     0.93       0.46              3.3
       32 x  128      0.67     1.7        0.86              6.6
       16 x  512      1.3      1.7        2.0              15
        1 x 2048      0.54     0.54       0.65              3.7

A view of a contiguous run copies nothing but costs a call a row; gathering whole blocks
copies long stretches and serves many rows in one call.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from batching.block_manager import BlockIds
from batching.inputs.images import Span
from batching.steps.step_plan import Slice

# From this many tokens on, a call of its own costs a row less than copying its keys.
_MIN_VIEW_TOKENS: Final = 512
# Rows of up to this many blocks are read together, whatever their length.
_SMALLEST_BUCKET: Final = 4


_Positions = TypeVar("_Positions", int, npt.NDArray[np.int64])


class SlidingWindow(NamedTuple):
    """A query sees the last `size` positions, its own among them; what `mask` is here.

    is_chunked: it sees those of them that lie in its own chunk, as positions are cut into such of `size`.
    """

    size: int
    is_chunked: bool = False

    def first(self, positions: _Positions) -> _Positions:
        """Return the first position that a query at each of these sees; it may be negative."""
        if self.is_chunked:
            return positions // self.size * self.size
        return positions - self.size + 1


class Pool(NamedTuple):
    """Keys or values of one layer: `[num_heads, num_blocks * block_size, head_dim]`."""

    keys: mx.array
    values: mx.array


@dataclass(frozen=True)
class RunContext:
    """The slots `[start, stop)`: a view."""

    start: int
    stop: int

    def read(self, pool: mx.array) -> mx.array:
        """Return `[1, num_heads, stop - start, head_dim]`."""
        return pool[None, :, self.start : self.stop]


@dataclass(frozen=True)
class GatheredContext:
    """Blocks from all over the pool, the same number for each row, first to last.

    blocks: int64 `[num_rows, num_blocks]`.
    num_tokens: how many of a row's slots count; the rest of the last block is cut off.
    """

    blocks: npt.NDArray[np.int64]
    block_size: int
    num_tokens: int
    _indices: dict[tuple[int, int], mx.array] = field(default_factory=dict)

    def read(self, pool: mx.array, after: mx.array | None = None) -> mx.array:
        """Return `[num_rows, num_heads, num_tokens, head_dim]`.

        after: uint32, all 0: what the copy is to wait for.

        A block of one head is contiguous, so the pool is seen as rows of that length and
        each of them is copied in one piece.  The heads of a row lie side by side: MLX's fused
        attention on Metal copies keys whose rows and heads are not one evenly spaced dimension.
        """
        num_heads, num_slots, head_dim = pool.shape
        num_pool_blocks = num_slots // self.block_size
        rows = pool.reshape(num_heads * num_pool_blocks, self.block_size * head_dim)
        index = self._index(num_heads, num_pool_blocks)
        gathered = rows[index if after is None else index + after[:1]]
        context = gathered.reshape(len(self.blocks), num_heads, -1, head_dim)
        return context[:, :, : self.num_tokens]

    def _index(self, num_heads: int, num_pool_blocks: int) -> mx.array:
        """Return which rows are the blocks, uint32 `[num_rows, num_heads, num_blocks]`."""
        key = (num_heads, num_pool_blocks)
        if key not in self._indices:
            heads = np.arange(num_heads)[:, None] * num_pool_blocks
            self._indices[key] = mx.array((heads + self.blocks[:, None]).astype(np.uint32))
        return self._indices[key]


@dataclass(frozen=True)
class RowGroup:
    """Rows that attend in one call.

    is_chunk: the rows are consecutive tokens of one request; else each is a decode.
    mask: None, "causal", or bool, true where a query sees a key.
    """

    num_rows: int
    is_chunk: bool
    context: RunContext | GatheredContext
    mask: mx.array | str | None

    def attend(
        self,
        queries: mx.array,
        pool: Pool,
        scale: float,
        soft_cap: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """`[num_rows, num_heads, 1, head_dim]` in and out."""
        keys, values = (self.context.read(each) for each in pool)
        return self.attend_to(queries, keys, values, scale, soft_cap, sinks)

    def attend_to(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        soft_cap: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend to keys and values that were read before; queries and output are as in `attend`."""
        if self.is_chunk:
            queries = queries.swapaxes(0, 2)
        if soft_cap:
            assert sinks is None, "no model has both"
            output = _capped(queries * scale, keys, values, soft_cap, self.mask)
        else:
            output = mx.fast.scaled_dot_product_attention(
                queries, keys, values, scale=scale, mask=self.mask, sinks=sinks
            )
        return output.swapaxes(0, 2) if self.is_chunk else output


def _capped(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    soft_cap: float,
    mask: mx.array | str | None,
) -> mx.array:
    """Attend with soft caps on the scores; `[B, num_heads, L, head_dim]` in and out."""
    length, num_keys = queries.shape[2], keys.shape[2]
    # The heads that share a key side by side, `[B, num_key_heads, num_sharing, L, head_dim]`.
    queries = mx.unflatten(queries, 1, (keys.shape[1], -1))
    scores = queries @ keys[:, :, None].swapaxes(-1, -2)
    scores = soft_cap * mx.tanh(scores / soft_cap)
    if isinstance(mask, str):
        mask = mx.tri(length, num_keys, num_keys - length, dtype=mx.bool_)
    if mask is not None:
        by_sharing = mask[:, None] if mask.ndim == 4 else mask
        scores = mx.where(by_sharing, scores, -mx.inf)
    output = mx.softmax(scores, axis=-1, precise=True) @ values[:, :, None]
    return output.flatten(1, 2)


class StepAttention:
    """How the rows of one step attend; made once a step and used by every layer.

    `slices` is the order of the rows: those that attend together lie side by side, so a
    group's queries are a view, too.

    views_decodes: a decode by itself may attend to a view of the pool.  MLX's attention on CUDA takes
        such a view for the whole pool from its first slot on, so there all decodes are gathered.
    views_chunks: a chunk by itself may attend to a view of the pool.
    """

    def __init__(
        self,
        slices: Sequence[Slice],
        block_size: int,
        *,
        is_windowed: bool = False,
        views_decodes: bool = True,
        views_chunks: bool = True,
    ) -> None:
        self._block_size = block_size
        self._is_windowed = is_windowed
        self._views_decodes = views_decodes
        self._views_chunks = views_chunks
        self._bundles = _bundle(slices, block_size, views_decodes)
        self.slices = [s for bundle in self._bundles for s in bundle]
        self._groups: dict[tuple[SlidingWindow | None, bool], list[RowGroup]] = {}

    def windowed(self) -> "StepAttention":
        """Return how the same rows attend in layers with blocks of their own."""
        return StepAttention(
            self.slices,
            self._block_size,
            is_windowed=True,
            views_decodes=self._views_decodes,
            views_chunks=self._views_chunks,
        )

    def attend(
        self,
        queries: mx.array,
        pool: Pool,
        *,
        scale: float,
        soft_cap: float = 0.0,
        window: SlidingWindow | None = None,
        sinks: mx.array | None = None,
        sees_ahead: bool = False,
    ) -> mx.array:
        """Attend all rows, `[num_rows, num_query_heads, 1, head_dim]` in and out.

        sees_ahead: rows of a span see each other.
        """
        outputs: list[mx.array] = []
        start = 0
        for group in self.groups(window, sees_ahead=sees_ahead):
            stop = start + group.num_rows
            outputs.append(group.attend(queries[start:stop], pool, scale, soft_cap, sinks))
            start = stop
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def groups(self, window: SlidingWindow | None, *, sees_ahead: bool = False) -> list[RowGroup]:
        key = window, sees_ahead
        if key not in self._groups:
            self._groups[key] = [self._group(bundle, *key) for bundle in self._bundles]
        return self._groups[key]

    def _group(
        self, bundle: list[Slice], window: SlidingWindow | None, sees_ahead: bool
    ) -> RowGroup:
        tables = [s.table(is_windowed=self._is_windowed) for s in bundle]
        if len(bundle[0]) > 1:
            spans = bundle[0].spans if sees_ahead else ()
            return _chunk(
                bundle[0], tables[0], self._block_size, window, spans, views=self._views_chunks
            )
        if self._views_decodes and len(bundle) == len(tables[0].runs) == 1:
            return _decode_view(bundle[0], tables[0], self._block_size, window)
        return _decodes(bundle, tables, self._block_size, window)


def _bundle(slices: Sequence[Slice], block_size: int, views_decodes: bool) -> list[list[Slice]]:
    """Put decodes of like length together; chunks, and rows worth a view, stay alone.

    The order is kept if this is done again.
    """
    alone: list[list[Slice]] = []
    buckets: dict[int, list[Slice]] = {}
    for s in slices:
        num_blocks = -(-s.stop // block_size)
        is_view = views_decodes and len(s.blocks.runs) == 1
        if len(s) > 1 or (is_view and s.stop >= _MIN_VIEW_TOKENS):
            alone.append([s])
        else:
            # Powers of two: padding at most doubles what a row reads.
            size = max(num_blocks, _SMALLEST_BUCKET)
            buckets.setdefault((size - 1).bit_length(), []).append(s)
    return [*buckets.values(), *alone]


def _first_block(start: int, block_size: int, window: SlidingWindow | None) -> int:
    """The block of the first position that a query at `start` sees."""
    return 0 if window is None else max(0, window.first(start)) // block_size


def _decodes(
    slices: Sequence[Slice],
    tables: Sequence[BlockIds],
    block_size: int,
    window: SlidingWindow | None,
) -> RowGroup:
    firsts = [_first_block(s.start, block_size, window) for s in slices]
    block_ids = [
        table.block_ids[first : -(-s.stop // block_size)]
        for s, table, first in zip(slices, tables, firsts, strict=True)
    ]
    width = max(map(len, block_ids))
    # Any block will do as padding: the mask hides it.
    blocks = np.array([ids + ids[:1] * (width - len(ids)) for ids in block_ids])
    starts = np.array(firsts)[:, None] * block_size
    stops = np.array([s.stop for s in slices])[:, None]
    num_tokens = int((stops - starts).max())
    positions = starts + np.arange(num_tokens)
    visible = positions < stops
    if window is not None:
        visible &= positions >= window.first(stops - 1)
    mask = None if visible.all() else mx.array(visible[:, None, None])
    return RowGroup(len(slices), False, GatheredContext(blocks, block_size, num_tokens), mask)


def _decode_view(
    s: Slice, table: BlockIds, block_size: int, window: SlidingWindow | None
) -> RowGroup:
    base = (table.runs[0].first_block - table.num_dropped) * block_size
    start = 0 if window is None else max(0, window.first(s.start))
    return RowGroup(1, False, RunContext(base + start, base + s.stop), None)


def _chunk(
    s: Slice,
    table: BlockIds,
    block_size: int,
    window: SlidingWindow | None,
    spans: Sequence[Span],
    *,
    views: bool,
) -> RowGroup:
    first = _first_block(s.start, block_size, window)
    start = first * block_size
    context: RunContext | GatheredContext
    if views and len(table.runs) == 1:
        base = (table.runs[0].first_block - table.num_dropped) * block_size
        context = RunContext(base + start, base + s.stop)
    else:
        blocks = np.array([table.block_ids[first : -(-s.stop // block_size)]])
        context = GatheredContext(blocks, block_size, s.stop - start)
    return RowGroup(len(s), True, context, _chunk_mask(s, start, window, spans))


def _chunk_mask(
    s: Slice, start: int, window: SlidingWindow | None, spans: Sequence[Span]
) -> mx.array | str:
    """MLX aligns "causal" to the end of the keys, which is the end of the chunk."""
    is_bounded = window is not None and window.first(s.stop - 1) > start
    if not is_bounded and not spans:
        return "causal"
    queries = np.arange(s.start, s.stop)[:, None]
    keys = np.arange(start, s.stop)
    lasts = queries.copy()
    for span in spans:
        lasts[span.start - s.start : span.stop - s.start] = span.stop - 1
    visible = keys <= lasts
    if window is not None:
        visible &= keys >= window.first(queries)
    return mx.array(visible)
