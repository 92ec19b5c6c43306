"""Attention of the rows of one step over a pool in numpy arrays.

Nothing is gathered: every contiguous run of blocks is a view, and one matrix product reads it for all
rows that share it.  The scores of all runs of a row are side by side, so each row has a single softmax,
however its blocks are scattered.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, product
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from batching.backend.paged.mlx_attention import SlidingWindow
from batching.block_manager import BlockIds
from batching.steps.step_plan import Slice

Floats = npt.NDArray[np.float32]

# Rows of a chunk that are scored together: with their scores they fit into the L2 cache.
_TILE_ROWS: Final = 64


class HostPool(NamedTuple):
    """Keys or values of one layer: `[num_heads, num_blocks * block_size, head_dim]`."""

    keys: Floats
    values: Floats


class Span(NamedTuple):
    """`rows` of a group find the columns of their scores in these slots of the pool."""

    rows: slice
    columns: slice
    slots: slice


class HostAttention:
    """How the rows of one step attend; it is made once per step and used by every layer."""

    def __init__(
        self, slices: Sequence[Slice], block_size: int, *, is_windowed: bool = False
    ) -> None:
        self.slices = list(slices)
        self._block_size = block_size
        self._tables = [s.table(is_windowed=is_windowed) for s in slices]
        self._groups: dict[SlidingWindow | None, list[DecodeGroup | Chunk]] = {}

    def windowed(self) -> "HostAttention":
        """Return how the same rows attend in layers with blocks of their own."""
        return HostAttention(self.slices, self._block_size, is_windowed=True)

    def attend(
        self,
        queries: Floats,
        pool: HostPool,
        *,
        scale: float,
        soft_cap: float = 0.0,
        window: SlidingWindow | None = None,
        sinks: Floats | None = None,
    ) -> Floats:
        """Attend all rows: `[num_rows, num_query_heads, head_dim]` in and out.

        Rows after those of the slices are padding, and get zeros.
        """
        num_heads = len(pool.keys)
        grouped = (queries * np.float32(scale)).reshape(
            len(queries), num_heads, -1, queries.shape[-1]
        )
        output = np.zeros((*grouped.shape[:3], pool.values.shape[-1]), np.float32)
        by_head = None if sinks is None else sinks.reshape(num_heads, -1)
        for group in self.groups(window):
            group.attend(grouped, pool, soft_cap, by_head, output)
        return output.reshape(len(queries), -1, output.shape[-1])

    def groups(self, window: SlidingWindow | None) -> list["DecodeGroup | Chunk"]:
        if window not in self._groups:
            contexts = _contexts(self.slices, self._tables, window)
            self._groups[window] = list(_groups(contexts, self._block_size, window))
        return self._groups[window]


@dataclass(frozen=True)
class DecodeGroup:
    """Rows of one token each, whose scores are padded to one width."""

    rows: npt.NDArray[np.int64]
    spans: list[Span]
    lengths: list[int]

    def attend(
        self,
        queries: Floats,
        pool: HostPool,
        soft_cap: float,
        sinks: Floats | None,
        output: Floats,
    ) -> None:
        """Queries `[T, H, G, D]`, of which the group's are read; outputs likewise."""
        num_heads, group_size = queries.shape[1:3]
        width = max(self.lengths)
        # The queries of a head side by side, so that rows that share a span are one operand.
        columns = (
            queries[self.rows]
            .transpose(1, 3, 0, 2)
            .reshape(num_heads, -1, len(self.rows) * group_size)
        )
        scores = np.full((num_heads, width, columns.shape[-1]), -np.inf, np.float32)
        for rows, seen, slots in self.spans:
            own = slice(rows.start * group_size, rows.stop * group_size)
            _score(pool.keys[:, slots], columns[:, :, own], soft_cap, scores[:, seen, own])
        weights = np.ascontiguousarray(scores.swapaxes(1, 2))
        totals = _exponentials(weights, None if sinks is None else np.tile(sinks, len(self.rows)))
        result = np.zeros((*weights.shape[:2], pool.values.shape[-1]), np.float32)
        for rows, seen, slots in self.spans:
            own = slice(rows.start * group_size, rows.stop * group_size)
            result[:, own] += weights[:, own, seen] @ pool.values[:, slots]
        result /= totals
        output[self.rows] = result.reshape(num_heads, len(self.rows), group_size, -1).swapaxes(0, 1)


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one request.

    first_row: of the step.  start: the position of the first token.
    context_start: the position of the first column.
    """

    first_row: int
    num_rows: int
    start: int
    context_start: int
    spans: list[Span]
    window: SlidingWindow | None

    def attend(
        self,
        queries: Floats,
        pool: HostPool,
        soft_cap: float,
        sinks: Floats | None,
        output: Floats,
    ) -> None:
        for head, first in product(range(len(pool.keys)), range(0, self.num_rows, _TILE_ROWS)):
            last = min(first + _TILE_ROWS, self.num_rows)
            rows = slice(self.first_row + first, self.first_row + last)
            output[rows, head] = self._tile(
                queries[rows, head],
                HostPool(pool.keys[head], pool.values[head]),
                self.start + first,
                soft_cap,
                None if sinks is None else sinks[head],
            )

    def _tile(
        self, queries: Floats, pool: HostPool, start: int, soft_cap: float, sinks: Floats | None
    ) -> Floats:
        """Attend rows `[L, G, D]` of one key head from position `start` on."""
        num_rows, group_size, dim = queries.shape
        width = start + num_rows - self.context_start
        flat = queries.reshape(-1, dim)
        scores = np.empty((len(flat), width), np.float32)
        spans = list(self._until(width))
        for columns, slots in spans:
            _score(flat, pool.keys[slots].T, soft_cap, scores[:, columns])
        by_row = scores.reshape(num_rows, group_size, width)
        self._hide(by_row, start)
        totals = _exponentials(by_row, sinks)
        result = np.zeros((len(flat), pool.values.shape[-1]), np.float32)
        for columns, slots in spans:
            result += scores[:, columns] @ pool.values[slots]
        by_row = result.reshape(num_rows, group_size, -1)
        by_row /= totals
        return by_row

    def _until(self, width: int) -> Iterator[tuple[slice, slice]]:
        for _, columns, slots in self.spans:
            if (surplus := columns.stop - width) >= columns.stop - columns.start:
                return
            cut = max(0, surplus)
            yield (
                slice(columns.start, columns.stop - cut),
                slice(slots.start, slots.stop - cut),
            )

    def _hide(self, scores: Floats, start: int) -> None:
        """Hide what a row does not see from scores `[L, G, width]`."""
        num_rows, _, width = scores.shape
        # Without a window every row sees what lies before the first one.
        first = max(0, width - num_rows) if self.window is None else 0
        keys = self.context_start + np.arange(first, width)
        positions = np.arange(start, start + num_rows)[:, None]
        hidden = keys > positions
        if self.window is not None:
            hidden |= keys < self.window.first(positions)
        np.copyto(scores[:, :, first:], -np.inf, where=hidden[:, None])


def _score(left: Floats, right: Floats, soft_cap: float, scores: Floats) -> None:
    """Write the scores of queries and keys, with a soft cap unless that is 0."""
    np.matmul(left, right, out=scores)
    if soft_cap:
        scores /= soft_cap
        np.tanh(scores, out=scores)
        scores *= soft_cap


def _exponentials(scores: Floats, sinks: Floats | None) -> Floats:
    """Turn scores `[..., width]` into unnormalised weights, in place; return their totals.

    A sink is one more score, of a key without a value (Xiao et al. 2023).
    """
    highest = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        highest = np.maximum(highest, sinks[..., None])
    scores -= highest
    np.exp(scores, out=scores)
    totals: Floats = scores.sum(axis=-1, keepdims=True)
    if sinks is not None:
        totals += np.exp(sinks[..., None] - highest)
    return totals


# From the slices to the groups


def _groups(
    contexts: Sequence["Context"], block_size: int, window: SlidingWindow | None
) -> Iterator[DecodeGroup | Chunk]:
    yield from (_chunk(c, block_size, window) for c in contexts if len(c.slice) > 1)
    buckets: dict[int, list[Context]] = {}
    for context in contexts:
        if len(context.slice) == 1:
            # Powers of two: padding at most doubles what a row reads.
            buckets.setdefault(context.num_tokens.bit_length(), []).append(context)
    yield from (_decode_group(bucket, block_size) for bucket in buckets.values())


class Context(NamedTuple):
    """What a slice reads: the positions `[start, slice.stop)`; `row` is its first row."""

    row: int
    slice: Slice
    table: BlockIds
    start: int

    @property
    def num_tokens(self) -> int:
        return self.slice.stop - self.start


def _contexts(
    slices: Sequence[Slice], tables: Sequence[BlockIds], window: SlidingWindow | None
) -> list[Context]:
    rows = accumulate(map(len, slices), initial=0)
    starts = [0 if window is None else max(0, window.first(s.start)) for s in slices]
    return [Context(*c) for c in zip(rows, slices, tables, starts, strict=False)]


def _chunk(context: Context, block_size: int, window: SlidingWindow | None) -> Chunk:
    row, s, _, start = context
    spans = list(_spans(context, start, slice(0, len(s)), block_size))
    return Chunk(row, len(s), s.start, start, spans, window)


def _decode_group(bucket: Sequence[Context], block_size: int) -> DecodeGroup:
    """Put rows side by side that begin with the same blocks; they read these together."""
    bucket = sorted(bucket, key=_first_block)
    spans: list[Span] = []
    row = 0
    for _, group in groupby(bucket, _first_block):
        sharing = list(group)
        rows = slice(row, row + len(sharing))
        stop = _num_shared_blocks(sharing, block_size) * block_size
        shared = sharing[0]._replace(
            slice=replace(sharing[0].slice, start=0, token_ids=(0,) * stop)
        )
        spans += _spans(shared, 0, rows, block_size)
        for context in sharing:
            own = slice(row, row + 1)
            spans += _spans(context, max(stop, context.start), own, block_size)
            row += 1
    return DecodeGroup(np.array([c.row for c in bucket]), spans, [c.num_tokens for c in bucket])


def _first_block(context: Context) -> int:
    return context.table.block_ids[0]


def _num_shared_blocks(contexts: Sequence[Context], block_size: int) -> int:
    """Return how many first blocks all contexts have in common, if they read them all."""
    if len(contexts) == 1 or any(c.start for c in contexts):
        return 0
    num_blocks = min(c.num_tokens for c in contexts) // block_size
    first, *others = (np.array(c.table.block_ids[:num_blocks]) for c in contexts)
    unlike = [np.flatnonzero(first != other) for other in others]
    return min([num_blocks, *(int(positions[0]) for positions in unlike if len(positions))])


def _spans(context: Context, start: int, rows: slice, block_size: int) -> Iterator[Span]:
    """Yield the runs that hold the positions from `start` on, for some rows of a group."""
    position = context.table.num_dropped * block_size
    for first_block, num_blocks in context.table.runs:
        base = first_block * block_size - position
        low, high = (
            max(position, start),
            min(position + num_blocks * block_size, context.slice.stop),
        )
        if low < high:
            columns = slice(low - context.start, high - context.start)
            yield Span(rows, columns, slice(base + low, base + high))
        position += num_blocks * block_size
