"""Linear layers of a model on a GPU, where decodes with unlike adapters are one product."""

from collections.abc import Mapping
from itertools import groupby
from typing import Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from batching.adapters.adapter import NO_SLOT
from batching.adapters.low_rank import LowRank
from batching.backend.adapters.linears import LinearModules, Segment, Weights, by_slot
from batching.backend.hooks.call_rows import CallRows
from batching.backend.hooks.changes import Changes

_HALVES: Final = {"F16": mx.float16, "BF16": mx.bfloat16}


class StackedLinearModules(LinearModules):
    """Modules of MLX: decodes with unlike adapters are one product, in which each row takes its own.

    A layer has the adapters of all slots in two arrays, `[S, inputs, rank]` and `[S, rank, outputs]`, of the
    largest rank that it has had; those of slot 0 are zeros.
    """

    def __init__(self, modules: Mapping[str, nn.Module], num_slots: int, changes: Changes) -> None:
        super().__init__(modules, changes)
        self._num_slots = num_slots
        self._stacks: dict[str, Weights] = {}
        # The layers that have something in a slot.
        self._filled: dict[int, frozenset[str]] = {}

    def put(self, slot: int, weights: Mapping[str, LowRank]) -> None:
        former = self._filled.get(slot, frozenset())
        # Also if one of them fails: the next adapter in the slot may not have those before it.
        self._filled[slot] = former | weights.keys()
        for path, layer in weights.items():
            self._stacks[path] = self._stacked(path, slot, layer)
            mx.eval(self._stacks[path])
        for path in (former - weights.keys()) & self._stacks.keys():
            # Its rows in a product with those of other adapters get nothing.
            stack = self._stacks[path][1]
            stack[slot] = 0
            mx.eval(stack)
        self._filled[slot] = frozenset(weights)
        self._used = set()

    def clear(self) -> None:
        self._stacks.clear()
        self._filled.clear()

    def _stacked(self, path: str, slot: int, low_rank: LowRank) -> Weights:
        """Return the stacks of a layer with other contents of a slot."""
        new_a, new_b = (narrowed(values, low_rank.dtype) for values in low_rank[:2])
        # Nothing else may refer to them, or they would be copied.
        a, b = self._stacks.pop(path, (self._zeros(new_a), self._zeros(new_b)))
        rank = max(a.shape[2], new_a.shape[1])
        a, b = _fitting(a, 2, rank, new_a.dtype), _fitting(b, 1, rank, new_b.dtype)
        a[slot], b[slot] = _fitting(new_a, 1, rank), _fitting(new_b, 0, rank)
        return a, b

    def _zeros(self, of_slot: mx.array) -> mx.array:
        return mx.zeros((self._num_slots + 1, *of_slot.shape), of_slot.dtype)

    def _segments_of(self, rows: CallRows) -> list[Segment]:
        if rows.is_chunk:
            return super()._segments_of(rows)
        segments: list[Segment] = []
        for is_prefill, group in groupby(rows.slices, lambda s: s.is_prefill):
            slices = list(group)
            if is_prefill or len({s.adapter_slot for s in slices}) == 1:
                segments += by_slot(slices)
            else:
                slots = [s.adapter_slot for s in slices for _ in s.token_ids]
                segments.append(Segment(len(slots), NO_SLOT, mx.array(slots, mx.uint32)))
        return segments

    def _delta(self, path: str, x: mx.array, segment: Segment) -> mx.array | None:
        stacks = self._stacks.get(path)
        if stacks is None or segment.slots is None:
            return super()._delta(path, x, segment)
        rows = x.reshape(segment.num_rows, -1, x.shape[-1])
        for stack in stacks:
            rows = mx.gather_mm(rows, stack, rhs_indices=segment.slots)
        return rows.reshape(*x.shape[:-1], rows.shape[-1])

    def _weights(self, path: str, slot: int) -> Weights | None:
        if path not in self._filled[slot]:
            return None
        a, b = self._stacks[path]
        return a[slot], b[slot]


def _fitting(values: mx.array, axis: int, rank: int, dtype: mx.Dtype | None = None) -> mx.array:
    """Return matrices with the same product, of a rank that may be larger, in a type that holds another as well."""
    if dtype is not None and (wider := mx.result_type(values, mx.zeros(0, dtype))) != values.dtype:
        values = values.astype(wider)
    if missing := rank - values.shape[axis]:
        values = mx.pad(values, [(0, missing if at == axis else 0) for at in range(values.ndim)])
    return values


def narrowed(values: npt.NDArray[np.float32], dtype: str) -> mx.array:
    """Return an array in a type of 16 bits, if that loses nothing: a scale may need more."""
    wide = mx.array(values)
    if dtype not in _HALVES:
        return wide
    narrow = wide.astype(_HALVES[dtype])
    return narrow if bool((narrow == wide).all()) else wide
