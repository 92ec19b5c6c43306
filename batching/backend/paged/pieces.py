"""The rows of a step, cut into the pieces that a model's own code can process.

A step is a batch of rows of length 1.  Most of a model takes them so; a recurrence, and attention
that is the model's own, take `[1, L, ...]` for a chunk of one request, and `[B, 1, ...]` for one token
each of several requests.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from batching.steps.step_plan import Slice


@dataclass(frozen=True, eq=False)
class Piece:
    """Consecutive rows `[first_row, stop_row)` that a module processes in one call.

    slices: one for a chunk, else one for each row.
    start: the position of a chunk's first token.
    previous: the piece of the same slice that a chunk continues.
    memo: what is worked out once for all layers.
    """

    slices: tuple[Slice, ...]
    is_chunk: bool
    first_row: int
    stop_row: int
    start: int = 0
    previous: "Piece | None" = None
    memo: dict[Hashable, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.stop_row - self.first_row

    @property
    def num_context_tokens(self) -> int:
        """How many tokens come before the rows; of decodes, before the row with the most."""
        return self.start if self.is_chunk else max(s.start for s in self.slices)

    @cached_property
    def offset(self) -> int | mx.array:
        """The position of the first token, of decodes of each row: as mlx-lm's caches have it."""
        return self.start if self.is_chunk else mx.array([s.start for s in self.slices], mx.int32)

    def enter(self, rows: mx.array) -> mx.array:
        """`[T, 1, ...]` to `[1, L, ...]` or `[B, 1, ...]`, `[T, H, 1, D]` to `[1, H, L, D]`."""
        taken = rows[self.first_row : self.stop_row]
        if not self.is_chunk:
            return taken
        return taken[:1] if rows.ndim == 1 else taken.swapaxes(0, _length_axis(rows))

    def leave(self, rows: mx.array) -> mx.array:
        """`[1, L, ...]` or `[B, 1, ...]` to `[L, 1, ...]` or `[B, 1, ...]`."""
        return rows.swapaxes(0, 1) if self.is_chunk else rows

    def split(self, kind: Callable[[Slice], Hashable]) -> Iterator["Piece"]:
        """Yield the parts of decodes that are of one kind."""
        row = self.first_row
        for _, group in groupby(self.slices, kind):
            slices = tuple(group)
            yield Piece(slices, False, row, row + len(slices))
            row += len(slices)


def cut(slices: Sequence[Slice], *, one_by_one: bool = False) -> list[Piece]:
    """Cut the rows of slices, in their order.

    A request that begins has a piece of its own also with one token: it has no state yet.  A chunk ends
    where a state is to be kept.

    one_by_one: no decodes share a piece.
    """
    pieces: list[Piece] = []
    row = 0
    for is_decode, group in groupby(slices, lambda s: len(s) == 1 and s.start > 0):
        run = tuple(group)
        if is_decode and not one_by_one:
            pieces.append(Piece(run, False, row, row + len(run)))
            row += len(run)
            continue
        for s in run:
            pieces += _chunks(s, row)
            row += len(s)
    return pieces


def _chunks(s: Slice, row: int) -> list[Piece]:
    ends = [s.start, *(at for at in s.keep if s.start < at < s.stop), s.stop]
    chunks: list[Piece] = []
    for start, stop in pairwise(ends):
        first = row + start - s.start
        previous = chunks[-1] if chunks else None
        chunks.append(Piece((s,), True, first, first + stop - start, start, previous))
    return chunks


def _length_axis(rows: mx.array) -> int:
    """Return which axis of ragged rows is that of tokens; it has one of them.

    Of four axes it is the third where the second is that of heads, and in factors of every head.
    """
    is_by_head = rows.ndim == 4 and rows.shape[2] == 1 and (rows.shape[1] > 1 or rows.shape[3] == 1)
    return 2 if is_by_head else 1


class KeepsAll:
    """A cache where mlx-lm's drops what has left its window, and Llama 4 asks it to."""

    def maybe_trim_front(self) -> None:
        """Drop nothing; attention does not see it."""


class DeferredMask(NamedTuple):
    """A mask that is made when the piece is known.

    window: a query sees that many last positions; None is all of them.
    is_array: the model wants an array also where a mask has a name.
    """

    window: int | None
    is_array: bool

    def of(self, piece: Piece) -> mx.array | str | None:
        """Return a mask over the context of a piece, which its own tokens follow.

        True where a query sees a key, `[L, S]` or `[B, 1, 1, S]`.
        """
        if self not in piece.memo:
            piece.memo[self] = self._of_chunk(piece) if piece.is_chunk else self._of_decodes(piece)
        mask: mx.array | str | None = piece.memo[self]
        return mask

    def _of_chunk(self, piece: Piece) -> mx.array | str | None:
        stop = piece.start + len(piece)
        sees_all = self.window is None or stop <= self.window
        if sees_all and len(piece) == 1:
            return None
        if sees_all and not self.is_array:
            return "causal"
        queries, keys = np.arange(piece.start, stop)[:, None], np.arange(stop)
        visible = keys <= queries
        if self.window is not None:
            visible &= keys > queries - self.window
        return mx.array(visible)

    def _of_decodes(self, piece: Piece) -> mx.array | None:
        starts = np.array([s.start for s in piece.slices])[:, None]
        keys = np.arange(piece.num_context_tokens)
        visible = keys < starts
        if self.window is not None:
            visible &= keys > starts - self.window
        if visible.all():
            return None
        own = np.ones((len(visible), 1), bool)
        return mx.array(np.concatenate([visible, own], axis=1)[:, None, None])
