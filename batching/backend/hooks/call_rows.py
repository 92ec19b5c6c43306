"""Which rows a model, or a module that runs on pieces of a step, is called with: for what adds to rows by adapter."""

import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from batching.backend.paged.pieces import Piece
from batching.steps.step_plan import Slice


@dataclass(frozen=True, eq=False)
class CallRows:
    """The rows of a call.

    slices: in the order of the rows; a chunk is one.
    is_chunk: the rows are `[1, L, ...]`, else they come first, `[T, 1, ...]`.
    memo: what is worked out once for all layers.
    """

    slices: Sequence[Slice]
    num_rows: int
    is_chunk: bool = False
    memo: dict[Hashable, Any] = field(default_factory=dict)


class RowsUser(Protocol):
    """What has to know the rows of a call."""

    def use(self, rows: CallRows | None) -> None:
        """Take the modules that are called from now on to have these rows; None is no matter which."""
        ...


@contextmanager
def called_with(user: RowsUser, slices: Sequence[Slice]) -> Iterator[None]:
    """Within the block, the model is called with the rows of slices."""
    rows = CallRows(slices, sum(map(len, slices)))
    _running.user, _running.rows = user, rows
    try:
        user.use(rows)
        yield
    finally:
        _running.user = _running.rows = None
        user.use(None)


@contextmanager
def called_with_piece(piece: Piece) -> Iterator[None]:
    """Within the block, a module is called with the rows of a piece."""
    if (user := _running.user) is None:
        yield
        return
    if CallRows not in piece.memo:
        piece.memo[CallRows] = CallRows(piece.slices, len(piece), piece.is_chunk)
    try:
        user.use(piece.memo[CallRows])
        yield
    finally:
        user.use(_running.rows)


class _Running(threading.local):
    """The model call of this thread, if its rows matter."""

    user: RowsUser | None = None
    rows: CallRows | None = None


_running: Final = _Running()
