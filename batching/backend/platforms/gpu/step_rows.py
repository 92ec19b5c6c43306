"""The rows of one step, as the kernels read them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from batching.backend.paged.mlx_attention import RowGroup, SlidingWindow, StepAttention
from batching.backend.platforms.gpu.pool_kernels import MIN_ELEMENTS, DecodeRows
from batching.steps.step_plan import Slice

# Longer slices gather their context once; up to here each row reads it by itself.
_MAX_DECODED: Final = 8
_NO_SLOT: Final = 2**32 - 1


class KernelAttention:
    """How the rows of one step attend; its arrays are made once a step, for all layers.

    First come the rows of short slices: decodes, and those with a few drafts.
    """

    def __init__(
        self, slices: Sequence[Slice], block_size: int, *, is_windowed: bool = False
    ) -> None:
        self._block_size = block_size
        self._is_windowed = is_windowed
        self._decoded = [s for s in slices if len(s) <= _MAX_DECODED and not s.spans]
        chunks = [s for s in slices if len(s) > _MAX_DECODED or s.spans]
        self.slices = [*self._decoded, *chunks]
        self.num_decoded = sum(map(len, self._decoded))
        self._chunks = StepAttention(
            chunks, block_size, is_windowed=is_windowed, views_chunks=False
        )
        self._rows: dict[SlidingWindow | None, DecodeRows] = {}
        self._slots: mx.array | None = None
        self._positions: mx.array | None = None

    def windowed(self) -> "KernelAttention":
        return KernelAttention(self.slices, self._block_size, is_windowed=True)

    def slots(self, slots: npt.NDArray[np.int64]) -> mx.array:
        """Return the slots of the step's tokens, uint32 `[max(T, 8)]`."""
        if self._slots is None:
            self._slots = padded_slots(slots)
        return self._slots

    def positions(self, positions: mx.array) -> mx.array:
        """Return the positions of a step's rows, int32 `[T]`, as the kernels take them: `[max(T, 8)]`."""
        if self._positions is None:
            num_missing = MIN_ELEMENTS - len(positions)
            self._positions = mx.pad(positions, (0, num_missing)) if num_missing > 0 else positions
        return self._positions

    def chunks(self, window: SlidingWindow | None, *, sees_ahead: bool = False) -> list[RowGroup]:
        """Return how the rows of each chunk attend, in their order."""
        return self._chunks.groups(window, sees_ahead=sees_ahead)

    def decodes(self, window: SlidingWindow | None) -> DecodeRows:
        """Return what the rows before those of chunks see."""
        if window not in self._rows:
            self._rows[window] = self._decode_rows(window)
        return self._rows[window]

    @property
    def windows(self) -> list[SlidingWindow | None]:
        """The windows for which there are `decodes`."""
        return list(self._rows)

    def arrays(
        self,
        slots: npt.NDArray[np.int64],
        positions: mx.array,
        windows: Iterable[SlidingWindow | None],
    ) -> list[mx.array]:
        """Return all that the kernels of a step without chunks read."""
        return [
            self.slots(slots),
            self.positions(positions),
            *(array for window in windows for array in self.decodes(window)),
        ]

    def unknown(self) -> "KernelAttention":
        """Return as many rows, of which nothing else is known."""
        made = KernelAttention([], self._block_size, is_windowed=self._is_windowed)
        made.num_decoded = self.num_decoded
        return made

    def of_arrays(
        self, arrays: Iterator[mx.array], windows: Iterable[SlidingWindow | None]
    ) -> "KernelAttention":
        """Return such rows with these arrays, in the order of `arrays`; they see through no other window."""
        made = self.unknown()
        made._slots, made._positions = next(arrays), next(arrays)
        made._rows = {window: DecodeRows(next(arrays), next(arrays)) for window in windows}
        return made

    def _decode_rows(self, window: SlidingWindow | None) -> DecodeRows:
        block_size = self._block_size
        tables: list[tuple[int, ...]] = []
        ranges: list[tuple[int, int]] = []
        for s in self._decoded:
            block_ids = s.table(is_windowed=self._is_windowed).block_ids
            for position in range(s.start, s.stop):
                first = 0 if window is None else max(0, window.first(position))
                tables.append(block_ids[first // block_size : position // block_size + 1])
                ranges.append((first % block_size, position + 1 - first))
        # Powers of two, so that there are few shapes; what is behind a row's blocks is not read.
        width = max(MIN_ELEMENTS, 1 << (max(map(len, tables)) - 1).bit_length())
        blocks = np.zeros((len(tables), width), np.uint32)
        for row, table in zip(blocks, tables, strict=True):
            row[: len(table)] = table
        ranges += [(0, 0)] * (MIN_ELEMENTS // 2 - len(ranges))
        return DecodeRows(mx.array(blocks), mx.array(np.array(ranges, np.int32)))


def padded_slots(slots: npt.NDArray[np.int64]) -> mx.array:
    """Return slots as the kernels take them, uint32 `[max(T, 8)]`."""
    return mx.array(padded(slots.astype(np.uint32), _NO_SLOT))


def padded(numbers: npt.NDArray[np.generic], padding: int) -> npt.NDArray[np.generic]:
    """Return an input of a kernel: with fewer elements than 8, Metal has another one for it."""
    num_missing = max(0, MIN_ELEMENTS - len(numbers))
    return np.pad(numbers, (0, num_missing), constant_values=padding)
