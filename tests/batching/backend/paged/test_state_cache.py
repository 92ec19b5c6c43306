"""States follow their requests through steps, forks, checkpoints and rejected drafts."""

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
import pytest
from hypothesis import given, settings, strategies as st

from batching.backend.paged.pieces import Piece, cut
from batching.backend.paged.state_cache import OwnCaches, RecurrentStates, StateCache
from batching.request import BatchRequest
from batching.steps.step_plan import Slice, StateCopy
from tests.support.requests import make_request, slice_of

NUM_SLOTS: Final = 4


class Step:
    def __init__(self, slices: Sequence[Slice], *, one_by_one: bool) -> None:
        self.pieces: list[Piece] = cut(slices, one_by_one=one_by_one)


class Total:
    """A cache object of a model's own: the sum of all tokens."""

    def __init__(self) -> None:
        self.sum = mx.zeros((1,))


def run(cache: StateCache, slices: Sequence[Slice], gone: tuple[int, ...] = ()) -> None:
    """Add each token to the state of its request."""
    step = Step(slices, one_by_one=isinstance(cache, OwnCaches))
    cache.begin(step, gone)
    for piece in step.pieces:
        view, token_ids = cache.piece(piece), [s.token_ids for s in piece.slices]
        if piece.is_chunk:
            (all_ids,) = token_ids
            first = piece.start - piece.slices[0].start
            token_ids = [all_ids[first : first + len(piece)]]
        added = mx.array([float(sum(ids)) for ids in token_ids])
        if isinstance(view, Total):
            view.sum = view.sum + added
        else:
            view[0] = added if view[0] is None else view[0] + added
    cache.flush()
    mx.eval(cache.written)


def state(cache: StateCache, slot: int, position: int) -> float:
    kept: Any = cache._slots[slot][position]
    if isinstance(kept, Total):
        return float(kept.sum)
    return float(kept.arrays[0][kept.row])


def request(slot: int, num_tokens: int = 40) -> BatchRequest:
    made = make_request(slot, [100 * (slot + 1) + i for i in range(num_tokens)], max_tokens=1)
    made.state_slot = slot
    return made


def expected(r: BatchRequest, position: int) -> float:
    return float(sum(r.token_ids[:position]))


@pytest.fixture(params=["arrays", "own caches"])
def cache(request: pytest.FixtureRequest) -> StateCache:
    return new_cache(request.param)


def new_cache(kind: str) -> StateCache:
    return RecurrentStates(1) if kind == "arrays" else OwnCaches(Total())


@settings(deadline=None)
@given(st.sampled_from(["arrays", "own caches"]), st.data())
def test_a_state_is_that_of_its_requests_tokens(kind: str, data: st.DataObject) -> None:
    """Whatever the order, the lengths, the positions kept and the drafts that are rejected."""
    cache = new_cache(kind)
    requests = [request(slot) for slot in range(NUM_SLOTS)]
    at = dict.fromkeys(range(NUM_SLOTS), 0)
    held: dict[int, set[int]] = {slot: set() for slot in range(NUM_SLOTS)}
    for _ in range(data.draw(st.integers(1, 6))):
        slots = data.draw(st.lists(st.integers(0, NUM_SLOTS - 1), min_size=1, unique=True))
        slices: list[Slice] = []
        for slot in slots:
            start, stop = at[slot], at[slot] + data.draw(st.sampled_from([1, 1, 1, 3, 6]))
            rejected = start > 0 and data.draw(st.booleans())
            earlier = [position for position in held[slot] if position <= start]
            choices = sorted({*earlier, *range(start + 1, stop)})
            keep = set(data.draw(st.lists(st.sampled_from(choices)))) if choices else set()
            keep |= {start} if rejected else set()
            slices.append(slice_of(requests[slot], start, stop, keep=tuple(sorted(keep))))
            held[slot] = {*keep, stop}
            at[slot] = start if rejected else stop
        run(cache, slices)
        for slot, positions in held.items():
            assert {*cache._slots.get(slot, ())} == positions
            for position in positions:
                assert state(cache, slot, position) == expected(requests[slot], position)


def test_a_copy_is_not_changed_by_what_its_source_does_next(cache: StateCache) -> None:
    source, fork = request(0), request(1)
    fork.token_ids[:5] = source.token_ids[:5]
    run(cache, [slice_of(source, 0, 5)])
    cache.copy(StateCopy(0, 1, 5))
    cache.copy(StateCopy(0, 3, 5))
    run(cache, [slice_of(source, 5, 6), slice_of(fork, 5, 6)])
    assert state(cache, 0, 6) == expected(source, 6)
    assert state(cache, 1, 6) == expected(fork, 6)
    assert state(cache, 3, 5) == expected(source, 5)


def test_an_unchanged_batch_goes_on_with_the_arrays_that_it_left() -> None:
    cache = RecurrentStates(1)
    requests = [request(slot) for slot in range(3)]
    run(cache, [slice_of(r, 0, 2) for r in requests])
    run(cache, [slice_of(r, 2, 3) for r in requests])
    left = cache._slots[0][3].arrays[0]
    assert all(cache._slots[slot][3].arrays[0] is left for slot in range(3))
    step = Step([slice_of(r, 3, 4) for r in requests], one_by_one=False)
    cache.begin(step)
    assert cache.piece(step.pieces[0])[0] is left
    reordered = Step([slice_of(r, 3, 4) for r in requests[::-1]], one_by_one=False)
    cache.begin(reordered)
    assert cache.piece(reordered.pieces[0])[0].tolist() == left.tolist()[::-1]


def test_a_request_that_pauses_or_leaves_holds_no_batch() -> None:
    cache = RecurrentStates(1)
    requests = [request(slot) for slot in range(3)]
    run(cache, [slice_of(r, 0, 2) for r in requests])
    run(cache, [slice_of(r, 2, 3) for r in requests])
    run(cache, [slice_of(requests[0], 3, 4)], gone=(2,))
    assert cache._slots[1][3].arrays[0].shape == (1,)
    assert state(cache, 1, 3) == expected(requests[1], 3)
    assert 2 not in cache._slots


def test_a_slot_that_is_taken_again_before_its_request_runs_keeps_what_was_copied_there() -> None:
    cache = RecurrentStates(1)
    gone, other = request(0), request(1)
    run(cache, [slice_of(gone, 0, 4), slice_of(other, 0, 4)])
    cache.copy(StateCopy(1, 0, 4))
    run(cache, [slice_of(other, 4, 5)], gone=(gone.request_id,))
    assert state(cache, 0, 4) == expected(other, 4)


def test_after_a_reset_there_is_nothing(cache: StateCache) -> None:
    run(cache, [slice_of(request(0), 0, 5)])
    cache.reset()
    assert cache._slots == {}
    assert cache.written == []


def test_requests_with_states_of_other_shapes_share_no_call() -> None:
    cache = RecurrentStates(1)
    requests = [request(slot) for slot in range(3)]
    slices = [slice_of(r, 0, 2) for r in requests]
    step = Step(slices, one_by_one=False)
    cache.begin(step)
    for piece, width in zip(step.pieces, (2, 2, 3), strict=True):
        cache.piece(piece)[0] = mx.zeros((1, width))
    cache.flush()
    kinds = [cache.can_share(slice_of(r, 2, 3)) for r in requests]
    assert kinds == [((2,),), ((2,),), ((3,),)]
