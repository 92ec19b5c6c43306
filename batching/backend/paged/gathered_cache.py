"""Keys and values that a model's own attention reads: gathered from the pool, a piece at a time."""

from typing import Any

import mlx.core as mx
import numpy as np

from batching.backend.paged.block_bytes import arrays_of, bytes_of
from batching.backend.paged.kv_cache import LayerCache, Slots, StepInputs
from batching.backend.paged.layout import LayerShape
from batching.backend.paged.mlx_attention import SlidingWindow
from batching.backend.paged.pieces import DeferredMask, KeepsAll, Piece
from batching.block_store.entry_file import Buffer

Rows = tuple[mx.array, mx.array]


class PieceKV(KeepsAll):
    """A cache of keys and values that a module gets for a piece in place of mlx-lm's.

    keys, values: `[B, num_heads, S, dim]`, the piece's own last; None before it has added these.
    """

    # The position of the first key.
    start_position = 0

    def __init__(self, layer: "GatheredLayerCache", piece: Piece) -> None:
        self._layer = layer
        self._piece = piece
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.added: Rows | None = None

    @property
    def offset(self) -> int | mx.array:
        return self._piece.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Rows:
        """Add the piece's rows, `[B, num_heads, L, dim]`, and return all keys and values."""
        self.added = (keys, values)
        context = self._layer.context(self._piece)
        self.keys, self.values = (
            mx.concatenate([old.astype(new.dtype), new], axis=2) if old.shape[2] else new
            for old, new in zip(context, (keys, values), strict=True)
        )
        return self.keys, self.values

    def keys_and_values(self) -> Rows:
        assert self.keys is not None and self.values is not None, "a layer adds before it reads"
        return self.keys, self.values

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        return DeferredMask(window_size or self._layer.shape.window, return_array).of(self._piece)


class GatheredLayerCache(LayerCache):
    """A pool in MLX arrays `[num_slots, num_heads, dim]`, so that a block is one stretch of memory.

    What a step adds is written when the next one begins: reading and writing an array in one graph
    would copy it.
    """

    def __init__(self, shape: LayerShape, num_slots: int, block_size: int) -> None:
        self._block_size = block_size
        self._pieces: dict[Piece, PieceKV] = {}
        self._pending: tuple[mx.array, ...] = ()
        super().__init__(shape, num_slots)

    @property
    def state(self) -> tuple[mx.array, ...]:
        return (*self._pool, *self._pending)

    def begin(self, step: StepInputs) -> None:
        self._write_pending()
        self._pieces = {}
        super().begin(step)

    def piece(self, piece: Piece) -> PieceKV:
        if piece not in self._pieces:
            self._pieces[piece] = PieceKV(self, piece)
        return self._pieces[piece]

    def context(self, piece: Piece) -> Rows:
        """Return what precedes a piece, `[B, num_heads, S, dim]` each.

        Of decodes with less context than others, what follows theirs is to be hidden by a mask.
        """
        if piece.previous is not None:
            return self._pieces[piece.previous].keys_and_values()
        keys, values = (self._gathered(array, piece) for array in self._pool)
        return keys, values

    def flush(self) -> None:
        added = [view.added for view in self._pieces.values() if view.added is not None]
        if not added:
            return
        dtype = self.shape.dtype
        keys, values = (
            mx.concatenate([_by_row(rows).astype(dtype) for rows in kind])
            for kind in zip(*added, strict=True)
        )
        self._pending = (keys, values)
        self._pieces = {}

    def copy(self, sources: Slots, targets: Slots) -> None:
        self._write_pending()
        for array in self._pool:
            # MLX divides by the size of a row.
            if array.size:
                array[mx.array(targets)] = array[mx.array(sources)]

    def export_block(self, slots: Slots) -> bytes:
        self._write_pending()
        return bytes_of(self._rows_of(slots))

    def import_block(self, slots: Slots, data: Buffer) -> None:
        self._write_pending()
        for array, new in zip(self._pool, arrays_of(data, self._rows_of(slots)), strict=True):
            if array.size:
                array[mx.array(slots)] = new

    def _rows_of(self, slots: Slots) -> list[mx.array]:
        return [array[mx.array(slots)] if array.size else array for array in self._pool]

    def reset(self) -> None:
        shape = self.shape
        self._pieces = {}
        self._pending = ()
        self._pool = tuple(
            mx.zeros((self.num_slots, shape.num_heads, dim), shape.dtype)
            for dim in (shape.key_dim, shape.value_dim)
        )

    def write(self, keys: mx.array, values: mx.array) -> None:
        raise TypeError("its keys and values are gathered for a piece at a time")

    def attend_within(
        self,
        queries: mx.array,
        scale: float,
        window: SlidingWindow | None,
        sinks: mx.array | None,
    ) -> mx.array:
        raise TypeError("its keys and values are gathered for a piece at a time")

    def _write_pending(self) -> None:
        # A slot of all heads is one row here.
        slots = self.step.slot_rows(1, self.num_slots) if self._pending else None
        for array, rows in zip(self._pool, self._pending, strict=False):
            if rows.size:
                array[slots] = rows
        self._pending = ()

    def _gathered(self, pool: mx.array, piece: Piece) -> mx.array:
        num_slots, num_heads, dim = pool.shape
        length = piece.num_context_tokens
        if not length or not dim:
            return mx.zeros((len(piece.slices), num_heads, length, dim), pool.dtype)
        by_block = pool.reshape(num_slots // self._block_size, -1)
        if "blocks" not in piece.memo:
            piece.memo["blocks"] = self._blocks(piece)
        rows = by_block[piece.memo["blocks"]].reshape(len(piece.slices), -1, num_heads, dim)
        return rows[:, :length].swapaxes(1, 2)

    def _blocks(self, piece: Piece) -> mx.array:
        """`[B, num_blocks]`; any block will do as padding: the mask hides it."""
        width = -(-piece.num_context_tokens // self._block_size)
        tables = [s.blocks.block_ids[:width] for s in piece.slices]
        return mx.array(np.array([t + t[:1] * (width - len(t)) for t in tables], np.uint32))


def _by_row(rows: Any) -> mx.array:
    """`[1, H, L, D]` or `[B, H, 1, D]` to `[T, H, D]`."""
    by_token: mx.array = rows.swapaxes(1, 2)
    return by_token.flatten(0, 1)
