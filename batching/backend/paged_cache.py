"""The KV pool, and the cache object that a model of mlx-lm is handed for each layer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from batching.backend.attention import Pool, SlidingWindow, StepAttention
from batching.block_manager import BlockCopy
from batching.request import BatchRequest
from batching.step_plan import Slice


class LayerShape(NamedTuple):
    """What one layer keeps for a token, as a probe of the model showed it.

    window: the layer attends to that many last positions; None is all of them.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        return self.num_heads * (self.key_dim + self.value_dim) * self.dtype.size


@dataclass(frozen=True)
class StepInputs:
    """One step as arrays: its T tokens are a batch of T rows of length 1.

    tokens: int32 `[T, 1]`.  positions, slots: int32 `[T]`.
    sample_rows: the rows that a token is sampled from, int32 `[S]`.
    requests: whom the sampled tokens are for, in that order.
    """

    tokens: mx.array
    positions: mx.array
    slots: mx.array
    sample_rows: mx.array
    requests: tuple[BatchRequest, ...]
    attention: StepAttention

    @classmethod
    def of(cls, slices: Sequence[Slice], block_size: int) -> "StepInputs":
        attention = StepAttention(slices, block_size)
        tokens: list[int] = []
        positions: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        slots: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        sample_rows: list[int] = []
        requests: list[BatchRequest] = []
        for s in attention.slices:
            tokens += s.request.token_ids[s.start : s.stop]
            at = np.arange(s.start, s.stop)
            first = s.start // block_size
            blocks = np.array(s.request.block_table.block_ids[first : -(-s.stop // block_size)])
            positions.append(at)
            slots.append(blocks[at // block_size - first] * block_size + at % block_size)
            if s.samples:
                sample_rows.append(len(tokens) - 1)
                requests.append(s.request)
        return cls(
            tokens=mx.array(tokens, dtype=mx.int32)[:, None],
            positions=mx.array(np.concatenate(positions).astype(np.int32)),
            slots=mx.array(np.concatenate(slots).astype(np.int32)),
            sample_rows=mx.array(sample_rows, dtype=mx.int32),
            requests=tuple(requests),
            attention=attention,
        )


class PagedLayerCache:
    """One layer's part of the pool, in the shape of an mlx-lm cache.

    `update_and_fetch` writes the new keys and values into their slots, in place (the pool
    array has no other reference then), and `attend` reads them through the block tables.
    A model passes what `make_mask` returns on to attention without looking into it.
    """

    def __init__(self, shape: LayerShape, num_slots: int) -> None:
        self._shape = shape
        self._num_slots = num_slots
        self._window = SlidingWindow(shape.window) if shape.window else None
        self._step: StepInputs | None = None
        self.reset()

    def reset(self) -> None:
        heads, slots, dtype = self._shape.num_heads, self._num_slots, self._shape.dtype
        self.pool = Pool(
            mx.zeros((heads, slots, self._shape.key_dim), dtype),
            mx.zeros((heads, slots, self._shape.value_dim), dtype),
        )

    def begin(self, step: StepInputs) -> None:
        self._step = step

    @property
    def step(self) -> StepInputs:
        assert self._step is not None, "a step begins before the model runs"
        return self._step

    # What mlx-lm's models use of a cache

    @property
    def offset(self) -> mx.array:
        """The position of each row."""
        return self.step.positions

    @property
    def state(self) -> Pool:
        return self.pool

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> SlidingWindow | None:
        return SlidingWindow(window_size) if window_size else self._window

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write `[T, num_heads, 1, dim]`; attention reads the pool and not what is returned."""
        self.pool.keys[:, self.step.slots] = keys.squeeze(2).swapaxes(0, 1)
        self.pool.values[:, self.step.slots] = values.squeeze(2).swapaxes(0, 1)
        return keys, values

    def attend(
        self, queries: mx.array, *, scale: float, mask: object, sinks: mx.array | None
    ) -> mx.array:
        if mask is not None and not isinstance(mask, SlidingWindow):
            raise TypeError(f"attention over the paged pool has no use for a mask of {type(mask)}")
        return self.step.attention.attend(queries, self.pool, scale=scale, window=mask, sinks=sinks)


class PagedKVCache:
    """All layers; the only place where keys and values live."""

    def __init__(self, shapes: Iterable[LayerShape], num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self.layers = [PagedLayerCache(shape, num_blocks * block_size) for shape in shapes]

    @property
    def arrays(self) -> list[mx.array]:
        return [array for layer in self.layers for array in layer.pool]

    def begin(self, slices: Sequence[Slice]) -> StepInputs:
        """Set the rows of the next forward pass."""
        step = StepInputs.of(slices, self._block_size)
        for layer in self.layers:
            layer.begin(step)
        return step

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks, as copy-on-write asks."""
        if not copies:
            return
        within = np.arange(self._block_size)
        sources = mx.array(np.concatenate([c.source * self._block_size + within for c in copies]))
        targets = mx.array(np.concatenate([c.target * self._block_size + within for c in copies]))
        for array in self.arrays:
            array[:, targets] = array[:, sources]

    def reset(self) -> None:
        """Start over with empty arrays, as after a step that raised."""
        for layer in self.layers:
            layer.reset()
        mx.eval(self.arrays)
