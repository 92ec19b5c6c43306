"""Recurrent states in the memory of the kernels, read and written by one operation a layer."""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise
from typing import Any, Final

import mlx.core as mx
import numpy as np

from batching.backend.paged.block_bytes import WrongBlock
from batching.backend.paged.kv_cache import StepInputs
from batching.backend.paged.state_cache import RecurrentStates, StepPieces
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.platforms.cpu.pools.pages import Region
from batching.steps.step_plan import Slice, StateCopy

# Where a state was that is in bytes.
_IN_ARRAYS: Final = b"A"
_IN_POOL: Final = b"P"


class StateCells:
    """Which cell of the pools holds which state: the same one in all layers.

    A slot holds states after one or several positions.  A cell that several slots share, or that a slot keeps,
    is never changed; any other one is overwritten by the state after it.
    """

    def __init__(self, native: Native) -> None:
        self._native = native
        self.reset()

    def reset(self) -> None:
        self._slots: dict[int, dict[int, int]] = {}
        # How many slots hold each cell.
        self._num_holders: list[int] = []
        self._free: list[int] = []
        # The sequence of each slot of the last step; those that are not in the next one are gone, or pause.
        self._owners: dict[int, int] = {}
        self._gone: Collection[int] = ()
        self._slices: list[Slice] = []
        self._planned: dict[int, dict[int, int]] = {}
        self._step: object | None = None

    def begin(self, slices: Iterable[Slice], gone: Collection[int] = ()) -> None:
        self._slices = list(slices)
        self._gone = gone
        self._step = None

    def step(self) -> object:
        """Return what the kernels do with the states in this step."""
        if self._step is None:
            self._planned = {}
            rows = np.array(self._rows(), np.int32).reshape(-1, 4)
            self._step = self._native.module.state_step(rows)
        return self._step

    def copy(self, copy: StateCopy) -> None:
        cell = self._slots[copy.source][copy.position]
        self._put(copy.target, {copy.position: cell})
        self._owners.pop(copy.target, None)

    def cell(self, slot: int, position: int) -> int:
        return self._slots[slot][position]

    def restore(self, slots: Sequence[int], position: int) -> None:
        """Let slots hold one state, in a cell that nothing else holds."""
        cell = self._take()
        for slot in slots:
            self._put(slot, {position: cell})
            self._owners.pop(slot, None)

    def flush(self) -> None:
        """Keep the states after the step, and those before it that the plan asks for."""
        owners = {s.slot: s.sequence_id for s in self._slices}
        for slot in self._owners.keys() - owners.keys():
            if self._owners[slot] in self._gone:
                self._put(slot, {})
        for slot, states in self._planned.items():
            self._put(slot, states)
        self._owners, self._planned = owners, {}

    def _rows(self) -> list[tuple[int, int, int, int]]:
        """Return first row, number of rows, and the cells before and after, of each piece of the step."""
        rows: list[tuple[int, int, int, int]] = []
        row = 0
        for s in self._slices:
            before = self._slots[s.slot] if s.start else {}
            states = {at: before[at] for at in s.keep if at <= s.start}
            source = before[s.start] if s.start else -1
            for start, stop in pairwise((s.start, *(p for p in s.keep if p > s.start), s.stop)):
                is_kept = source < 0 or start in s.keep or self._num_holders[source] > 1
                target = self._take() if is_kept else source
                rows.append((row, stop - start, source, target))
                states[stop] = source = target
                row += stop - start
            self._planned[s.slot] = states
        return rows

    def _take(self) -> int:
        """Return a cell that nothing holds."""
        if not self._free:
            self._free.append(len(self._num_holders))
            self._num_holders.append(0)
        return self._free.pop()

    def _put(self, slot: int, states: dict[int, int]) -> None:
        for cell in states.values():
            self._num_holders[cell] += 1
        for cell in self._slots.pop(slot, {}).values():
            self._num_holders[cell] -= 1
            if self._num_holders[cell] == 0:
                self._free.append(cell)
        if states:
            self._slots[slot] = states


class NativeStates(RecurrentStates):
    """One layer's states: in a pool of the kernels if its mixer is one operation, else in arrays."""

    def __init__(self, num_arrays: int, cells: StateCells, *, is_first: bool) -> None:
        """is_first: of the layers that share the cells; it keeps them up to date."""
        self._cells = cells
        self._is_first = is_first
        self._pool: Any = None
        super().__init__(num_arrays)

    def reset(self) -> None:
        super().reset()
        self._pool = None
        # By their cells.
        self._restored: dict[int, bytes] = {}
        self._output: mx.array | None = None
        if self._is_first:
            self._cells.reset()

    def begin(self, step: StepPieces, gone: Collection[int] = ()) -> None:
        super().begin(step, gone)
        self._output = None
        if self._is_first:
            assert isinstance(step, StepInputs)
            self._cells.begin(step.attention.slices, gone)

    def copy(self, copy: StateCopy) -> None:
        if self._is_first:
            self._cells.copy(copy)
        if self._pool is None:
            super().copy(copy)

    def export_state(self, slot: int, position: int) -> bytes:
        if self._pool is None:
            return _IN_ARRAYS + super().export_state(slot, position)
        mx.synchronize()
        return _IN_POOL + Region(*self._pool.cell(self._cells.cell(slot, position))).read()

    def import_state(self, slots: Sequence[int], position: int, data: bytes) -> None:
        if self._is_first:
            self._cells.restore(slots, position)
        kind, data = data[:1], data[1:]
        if kind == _IN_ARRAYS:
            super().import_state(slots, position, data)
            return
        self._restored[self._cells.cell(slots[0], position)] = data
        if self._pool is not None:
            self._write_restored(self._pool)

    def _write_restored(self, pool: Any) -> None:
        """Write restored states to their cells; there is no pool before the first step."""
        mx.synchronize()
        for cell, data in self._restored.items():
            region = Region(*pool.cell(cell))
            if region.size != len(data):
                raise WrongBlock(f"a state of this layer has {region.size} bytes, not {len(data)}")
            region.write(data)
        self._restored.clear()

    def flush(self) -> None:
        if self._is_first:
            # Also for layers whose states are in arrays, so that it does not depend on which is first.
            self._cells.step()
            self._cells.flush()
        super().flush()
        if self._output is not None:
            # Evaluating it writes, even if no logits are needed.
            self.written.append(self._output)

    def run(
        self, make_pool: Callable[[], object], run: Callable[[object, object], mx.array]
    ) -> mx.array:
        """Run what reads and writes the step's states, given pool and step."""
        if self._pool is None:
            self._pool = make_pool()
            self._write_restored(self._pool)
        self._output = run(self._pool, self._cells.step())
        return self._output
