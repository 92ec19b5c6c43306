"""The linear layers of a model that add something to their rows, to each by the adapter of its request."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import ClassVar, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from batching.adapters.low_rank import LowRank
from batching.backend.hooks.call_rows import CallRows
from batching.backend.hooks.changes import Changes
from batching.steps.step_plan import Slice

Weights = tuple[mx.array, mx.array]


class AdaptedLinears(ABC):
    """Linear layers of one kind, and what the adapters in the slots have for them.

    max_rank: the largest rank that they take; None is any.
    """

    max_rank: ClassVar[int | None] = None

    @property
    @abstractmethod
    def paths(self) -> Iterable[str]:
        """The paths of the layers in the model."""

    @abstractmethod
    def put(self, slot: int, weights: Mapping[str, LowRank]) -> None:
        """Fill a slot, by the paths of layers; a step that was built before keeps what was in it."""

    @abstractmethod
    def clear(self) -> None:
        """Empty all slots."""

    @abstractmethod
    def use(self, rows: CallRows | None) -> None:
        """Add to these rows from now on; None adds nothing."""

    @abstractmethod
    def used(self, slot: int) -> set[str]:
        """Return the paths of the layers that have added what is in a slot, if it was filled last."""


class Segment(NamedTuple):
    """Consecutive rows that have the adapter in one slot.

    slots: uint32 `[num_rows]`, those of each row, where they have several; `slot` says nothing then.
    """

    num_rows: int
    slot: int
    slots: mx.array | None = None


class LinearModules(AdaptedLinears):
    """Modules of MLX: rows of one adapter are multiplied together."""

    def __init__(self, modules: Mapping[str, nn.Module], changes: Changes) -> None:
        self._modules = modules
        self._slots: dict[int, Mapping[str, Weights]] = {}
        self._used: set[str] = set()
        self._rows: CallRows | None = None
        self._segments: Sequence[Segment] = ()
        for path, module in modules.items():
            changes.override_call(module, self._call_of(type(module), path))

    @property
    def paths(self) -> Iterable[str]:
        return self._modules.keys()

    def put(self, slot: int, weights: Mapping[str, LowRank]) -> None:
        # In float32: on a CPU, MLX multiplies nothing else through BLAS.
        arrays = {path: (mx.array(each.a), mx.array(each.b)) for path, each in weights.items()}
        mx.eval(*arrays.values())
        self._slots[slot] = arrays
        self._used = set()

    def clear(self) -> None:
        self._slots.clear()

    def use(self, rows: CallRows | None) -> None:
        self._rows = rows
        if rows is not None:
            if self not in rows.memo:
                rows.memo[self] = self._segments_of(rows)
            self._segments = rows.memo[self]

    def used(self, slot: int) -> set[str]:
        return self._used

    def _call_of(self, plain: type[nn.Module], path: str) -> Callable[..., mx.array]:
        def call(module: nn.Module, x: mx.array) -> mx.array:
            y: mx.array = plain.__call__(module, x)
            rows = self._rows
            return y if rows is None else self._adapted(path, x, y, rows)

        return call

    def _adapted(self, path: str, x: mx.array, y: mx.array, rows: CallRows) -> mx.array:
        if rows.is_chunk:
            return self._added(path, x, y, self._segments[0])
        # Each row may be several, if they lie side by side.
        each, rest = divmod(len(x), rows.num_rows)
        if rest or x.ndim == 1:
            raise ValueError(f"{path} is not called with the rows of a step, but with {x.shape}")
        if len(self._segments) == 1:
            return self._added(path, x, y, self._segments[0])
        parts: list[mx.array] = []
        start = 0
        for segment in self._segments:
            stop = start + each * segment.num_rows
            parts.append(self._added(path, x[start:stop], y[start:stop], segment))
            start = stop
        return mx.concatenate(parts)

    def _added(self, path: str, x: mx.array, y: mx.array, segment: Segment) -> mx.array:
        """Return rows of the output, `[..., outputs]`, with what adapters add; others are as they were."""
        delta = self._delta(path, x, segment)
        if delta is None:
            return y
        self._used.add(path)
        return y + delta.astype(y.dtype)

    def _delta(self, path: str, x: mx.array, segment: Segment) -> mx.array | None:
        weights = self._weights(path, segment.slot) if segment.slot else None
        return None if weights is None else (x @ weights[0]) @ weights[1]

    def _weights(self, path: str, slot: int) -> Weights | None:
        return self._slots[slot].get(path)

    def _segments_of(self, rows: CallRows) -> list[Segment]:
        return segments_of(rows)


def segments_of(rows: CallRows) -> list[Segment]:
    """Return the rows of a call by adapter, in their order."""
    if rows.is_chunk:
        return [Segment(rows.num_rows, rows.slices[0].adapter_slot)]
    return list(by_slot(rows.slices))


def by_slot(slices: Iterable[Slice]) -> Iterator[Segment]:
    """Yield the rows of slices by adapter, in their order."""
    for slot, group in groupby(slices, lambda s: s.adapter_slot):
        yield Segment(sum(map(len, group)), slot)
