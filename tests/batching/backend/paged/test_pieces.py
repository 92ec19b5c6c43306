"""A step is cut into pieces that have each row once, and a piece's mask is that of its positions."""

from typing import Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

from batching.backend.paged.pieces import DeferredMask, Piece, cut
from batching.steps.step_plan import Slice
from tests.support.requests import make_request, slice_of

MAX_LENGTH: Final = 12
WINDOWS: Final = st.sampled_from([None, 1, 3, 8, 100])


@st.composite
def steps(draw: st.DrawFn) -> list[Slice]:
    """Chunks, decodes and first tokens of several requests, some with states that are to be kept."""
    slices: list[Slice] = []
    for request_id in range(draw(st.integers(1, 7))):
        start = draw(st.integers(0, 20))
        stop = start + draw(st.sampled_from([1, 1, 1, 2, 5, MAX_LENGTH]))
        keep = draw(st.sets(st.integers(max(0, start - 3), stop - 1)))
        request = make_request(request_id, range(1, stop + 1), max_tokens=1)
        slices.append(slice_of(request, start, stop, keep=tuple(sorted(keep))))
    return slices


def positions(piece: Piece) -> list[int]:
    """Return the position of each row."""
    if piece.is_chunk:
        return list(range(piece.start, piece.start + len(piece)))
    return [s.start for s in piece.slices]


@given(steps(), st.booleans())
def test_each_row_is_in_one_piece_and_in_its_order(step: list[Slice], one_by_one: bool) -> None:
    pieces = cut(step, one_by_one=one_by_one)
    rows = [row for piece in pieces for row in range(piece.first_row, piece.stop_row)]
    assert rows == list(range(sum(map(len, step))))
    at = [position for piece in pieces for position in positions(piece)]
    assert at == [position for s in step for position in range(s.start, s.stop)]


@given(steps(), st.booleans())
def test_only_decodes_share_a_piece_and_a_chunk_ends_where_a_state_is_kept(
    step: list[Slice], one_by_one: bool
) -> None:
    for piece in cut(step, one_by_one=one_by_one):
        if not piece.is_chunk:
            assert not one_by_one
            assert all(len(s) == 1 and s.start > 0 for s in piece.slices)
            continue
        (s,) = piece.slices
        stop = piece.start + len(piece)
        assert stop == s.stop or stop in s.keep
        assert not any(piece.start < at < stop for at in s.keep)
        before = piece.previous
        assert (before is None) == (piece.start == s.start)
        assert before is None or before.start + len(before) == piece.start


@given(steps())
def test_what_enters_a_piece_leaves_it_unchanged(step: list[Slice]) -> None:
    num_rows = sum(map(len, step))
    for shape in ((num_rows, 1, 3), (num_rows, 2, 1, 3), (num_rows, 1)):
        rows = mx.random.normal(shape)
        for piece in cut(step):
            entered = piece.enter(rows)
            axis = 2 if len(shape) == 4 else 1
            assert entered.shape[0] == (1 if piece.is_chunk else len(piece))
            assert entered.shape[axis] == (len(piece) if piece.is_chunk else 1)
            if axis == 1:
                left = piece.leave(entered)
                assert mx.array_equal(left, rows[piece.first_row : piece.stop_row])


def visible(mask: mx.array | str | None, piece: Piece, num_keys: int) -> npt.NDArray[np.bool_]:
    """Return what a mask shows, a row of keys for each row."""
    shape = (len(piece), num_keys)
    if mask is None:
        return np.ones(shape, bool)
    if isinstance(mask, str):
        assert mask == "causal"
        return np.tril(np.ones(shape, bool), k=num_keys - len(piece))
    return np.broadcast_to(np.array(mask).reshape(-1, num_keys), shape)


@settings(deadline=None)
@given(steps(), WINDOWS, st.booleans())
def test_a_row_sees_its_window_and_itself(
    step: list[Slice], window: int | None, is_array: bool
) -> None:
    for piece in cut(step):
        mask = DeferredMask(window, is_array).of(piece)
        at = positions(piece)
        if piece.is_chunk:
            keys = np.tile(np.arange(at[-1] + 1), (len(piece), 1))
        else:
            # The context, padded to that of the row with the most, and then the row itself.
            context = np.tile(np.arange(max(at)), (len(piece), 1))
            keys = np.concatenate([context, np.array(at)[:, None]], axis=1)
        expected = np.zeros(keys.shape, bool)
        for row, position in enumerate(at):
            oldest = 0 if window is None else position - window + 1
            expected[row] = (oldest <= keys[row]) & (keys[row] <= position)
            if not piece.is_chunk:
                expected[row, position:-1] = False
        assert (visible(mask, piece, keys.shape[1]) == expected).all()


def test_a_mask_has_a_name_unless_an_array_is_wanted() -> None:
    (piece,) = cut([slice_of(make_request(0, range(1, 6), max_tokens=1), 0, 5)])
    assert DeferredMask(None, is_array=False).of(piece) == "causal"
    assert isinstance(DeferredMask(None, is_array=True).of(piece), mx.array)
    assert isinstance(DeferredMask(3, is_array=False).of(piece), mx.array)


@pytest.mark.parametrize("offset", [1, 7])
def test_decodes_split_where_their_kind_changes(offset: int) -> None:
    requests = [make_request(i, range(1, 12), max_tokens=1) for i in range(4)]
    (piece,) = cut([slice_of(r, offset + i, offset + i + 1) for i, r in enumerate(requests)])
    parts = list(piece.split(lambda s: s.sequence_id // 3))
    assert [(part.first_row, part.stop_row) for part in parts] == [(0, 3), (3, 4)]
    offsets = [part.offset.tolist() for part in parts if isinstance(part.offset, mx.array)]
    assert offsets == [[offset, offset + 1, offset + 2], [offset + 3]]
