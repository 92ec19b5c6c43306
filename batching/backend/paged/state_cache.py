"""States that a layer keeps besides keys and values in the pool: one a request and position."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from batching.backend.paged.block_bytes import packed_arrays, unpacked_arrays
from batching.backend.paged.pieces import Piece
from batching.steps.step_plan import Slice, StateCopy


class StepPieces(Protocol):
    """The step as a layer's caches know it."""

    @property
    def pieces(self) -> Sequence[Piece]: ...


class StateCache(ABC):
    """One layer's states, in the slots that the scheduler gives to requests and to checkpoints.

    A slot holds states after one or several positions; they are never changed.  A module that is
    called for a piece gets a view that it can change, and what the views hold at the end of the step are
    the new states: one layer can have several modules that keep a state.
    """

    def __init__(self) -> None:
        self._step: StepPieces | None = None
        self.reset()

    def reset(self) -> None:
        self._slots: dict[int, dict[int, Any]] = {}
        # The sequence of each slot of the last step, whose states may be rows of a batch.
        self._owners: dict[int, int] = {}
        self._gone: Collection[int] = ()
        self._views: dict[tuple[int, int], tuple[Piece, Any]] = {}
        self._copied: list[mx.array] = []
        # To be evaluated with the step.
        self.written: list[mx.array] = []

    @property
    def step(self) -> StepPieces:
        assert self._step is not None, "a step begins before the model runs"
        return self._step

    def begin(self, step: StepPieces, gone: Collection[int] = ()) -> None:
        """Begin a step; the slots of the sequences `gone` belong to others now, or to none."""
        self._step = step
        self._gone = gone
        self._views = {}

    def copy(self, copy: StateCopy) -> None:
        state = self._slots[copy.source][copy.position]
        self._slots[copy.target] = {copy.position: self._kept(state)}
        self._owners.pop(copy.target, None)

    # What it holds can be stored, and restored in another life.
    can_be_stored = False

    def export_state(self, slot: int, position: int) -> bytes:
        """Return a state as bytes."""
        raise NotImplementedError

    def import_state(self, slots: Sequence[int], position: int, data: bytes) -> None:
        """Put what `export_state` has returned into slots, which have no other states then.

        Raises:
            WrongBlock: it is of another form.
        """
        raise NotImplementedError

    def make_mask(self, num_tokens: int) -> None:
        """Return None, for no mask: nothing is padded."""
        return

    def piece(self, piece: Piece) -> Any:
        """Return what a module gets in place of mlx-lm's cache."""
        key = (piece.first_row, piece.stop_row)
        if key not in self._views:
            if piece.previous is not None:
                view = self._continue(self.piece(piece.previous))
            else:
                view = self._begin([self._state(s) for s in piece.slices])
            self._views[key] = (piece, view)
        return self._views[key][1]

    def flush(self) -> None:
        """Keep the states after the step, and those before it that the plan asks for."""
        kept: dict[int, dict[int, Any]] = {}
        owners: dict[int, int] = {}
        self.written = []
        for piece, view in self._views.values():
            states = self._end(view, len(piece.slices))
            for s, state in zip(piece.slices, states, strict=True):
                stop = piece.start + len(piece) if piece.is_chunk else s.stop
                kept.setdefault(s.slot, self._earlier(s))[stop] = state
                owners[s.slot] = s.sequence_id
        self._leave_batch(self._owners.keys() - kept.keys())
        self._slots.update(kept)
        self._owners = owners
        self._views = {}
        self.written += self._copied
        self._copied = []

    def _leave_batch(self, slots: Iterable[int]) -> None:
        """Drop the states of requests that have gone, and copy those of requests that pause.

        They would keep the states of their last batch in memory.
        """
        for slot in slots:
            if self._owners[slot] not in self._gone:
                states = self._slots[slot]
                self._slots[slot] = {at: self._kept(state) for at, state in states.items()}
            else:
                del self._slots[slot]

    @abstractmethod
    def can_share(self, s: Slice) -> Hashable:
        """Return the kind of a decode; those of one kind can be processed together."""

    @abstractmethod
    def _begin(self, states: Sequence[Any]) -> Any:
        """Return a view of the states of a piece's requests; None is that of one that begins."""

    @abstractmethod
    def _continue(self, previous: Any) -> Any:
        """Return a view that begins with what an earlier piece of the same request leaves."""

    @abstractmethod
    def _end(self, view: Any, num_requests: int) -> Sequence[Any]:
        """Return the states that a view holds, one a request; their arrays go to `written`."""

    @abstractmethod
    def _own(self, state: Any) -> Any:
        """Return a state that keeps nothing else in memory, the same one if it is such."""

    @abstractmethod
    def _arrays(self, state: Any) -> Sequence[mx.array]: ...

    def _state(self, s: Slice) -> Any:
        return None if s.start == 0 else self._slots[s.slot][s.start]

    def _earlier(self, s: Slice) -> dict[int, Any]:
        """Return the states up to the slice's start that stay in its slot."""
        if s.start == 0:
            return {}
        states = self._slots[s.slot]
        # A state that is kept for longer than a step must not keep the others of its batch alive.
        return {
            at: states[at] if at == s.start else self._kept(states[at])
            for at in s.keep
            if at <= s.start
        }

    def _kept(self, state: Any) -> Any:
        own = self._own(state)
        if own is not state:
            self._copied += self._arrays(own)
        return own


@dataclass(frozen=True)
class _Rows:
    """Row `row` of arrays `[B, ...]` that hold the states of one or several requests.

    An entry is None where the model has set nothing.

    is_own: they hold nothing else.
    """

    arrays: tuple[mx.array | None, ...]
    row: int = 0
    num_rows: int = 1
    is_own: bool = False


class PieceState(ArraysCache):
    """An entry that the module has not set is the one that the piece before left, once that has run."""

    def __init__(self, entries: Sequence[Any], previous: "PieceState | None" = None) -> None:
        super().__init__(len(entries))
        self.cache = list(entries)
        self._previous = previous
        self._is_set = [previous is None] * len(entries)

    def __getitem__(self, idx: int) -> Any:
        if not self._is_set[idx]:
            assert self._previous is not None
            return self._previous[idx]
        return self.cache[idx]

    def __setitem__(self, idx: int, value: Any) -> None:
        self.cache[idx] = value
        self._is_set[idx] = True

    @property
    def arrays(self) -> tuple[mx.array | None, ...]:
        return tuple(self[i] for i in range(len(self.cache)))


class RecurrentStates(StateCache):
    """States in arrays, in place of mlx-lm's ArraysCache; those of decodes are stacked."""

    def __init__(self, num_arrays: int) -> None:
        self._empty = _Rows((None,) * num_arrays)
        super().__init__()

    can_be_stored = True

    def export_state(self, slot: int, position: int) -> bytes:
        return packed_arrays(self._own(self._slots[slot][position]).arrays)

    def import_state(self, slots: Sequence[int], position: int, data: bytes) -> None:
        state = _Rows(tuple(unpacked_arrays(data)), is_own=True)
        for slot in slots:
            self._slots[slot] = {position: state}
            self._owners.pop(slot, None)

    def can_share(self, s: Slice) -> Hashable:
        arrays = self._state(s).arrays
        return tuple(None if a is None else a.shape[1:] for a in arrays)

    def _begin(self, states: Sequence[_Rows | None]) -> PieceState:
        return PieceState(_stacked([state or self._empty for state in states]))

    def _continue(self, previous: PieceState) -> PieceState:
        return PieceState(self._empty.arrays, previous)

    def _end(self, view: PieceState, num_requests: int) -> list[_Rows]:
        arrays = view.arrays
        self.written += [a for a in arrays if a is not None]
        return [_Rows(arrays, row, num_requests) for row in range(num_requests)]

    def _own(self, state: _Rows) -> _Rows:
        if state.is_own:
            return state
        row = mx.array([state.row])
        return _Rows(tuple(None if a is None else a[row] for a in state.arrays), is_own=True)

    def _arrays(self, state: _Rows) -> list[mx.array]:
        return [a for a in state.arrays if a is not None]


def _stacked(states: Sequence[_Rows]) -> list[mx.array | None]:
    """Return the states of several requests in one array an entry, `[B, ...]`.

    Nothing is copied if the last step left them like this.
    """
    first = states[0]
    if len(states) == first.num_rows and all(
        state.arrays is first.arrays and state.row == row for row, state in enumerate(states)
    ):
        return list(first.arrays)
    rows = zip(*([_row(a, s.row) for a in s.arrays] for s in states), strict=True)
    return [None if row[0] is None else mx.concatenate(list(row)) for row in rows]


def _row(array: mx.array | None, row: int) -> mx.array | None:
    return None if array is None else array[row : row + 1]


class OwnCaches(StateCache):
    """Cache objects of the model's own, of whatever kind, one a request.

    `deepcopy` shares their arrays until one is written to, so a copy costs little.
    """

    def __init__(self, empty: Any) -> None:
        self._empty = empty
        super().__init__()

    def can_share(self, s: Slice) -> Hashable:
        return s.sequence_id

    def _begin(self, states: Sequence[Any]) -> Any:
        (state,) = states
        return deepcopy(self._empty if state is None else state)

    def _continue(self, previous: Any) -> Any:
        return deepcopy(previous)

    def _end(self, view: Any, num_requests: int) -> list[Any]:
        self.written += arrays_of(view)
        return [view]

    def _own(self, state: Any) -> Any:
        return state

    def _arrays(self, state: Any) -> list[mx.array]:
        return list(arrays_of(state))


def arrays_of(value: Any) -> Iterator[mx.array]:
    """Find the arrays in a cache object, whatever it is made of."""
    if isinstance(value, mx.array):
        yield value
    elif isinstance(value, dict):
        yield from arrays_of(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from arrays_of(item)
    elif hasattr(value, "__dict__"):
        yield from arrays_of(vars(value))
