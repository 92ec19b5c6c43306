"""Linear layers of packed weights, to whose products the native kernels add adapters."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import mlx.core as mx

from batching.adapters.low_rank import LowRank
from batching.backend.adapters.linears import AdaptedLinears, segments_of
from batching.backend.adapters.stacked import narrowed
from batching.backend.hooks.call_rows import CallRows


class NativeAdapter(Protocol):
    """An adapter as the kernels have it."""

    def touched(self) -> Sequence[int]:
        """Return which of its layers products were computed with, by their places in it."""
        ...


class AdapterKernels(Protocol):
    """What the native kernels offer for adapters."""

    def adapter(self, layers: Sequence[tuple[Any, mx.array, mx.array]]) -> NativeAdapter:
        """Return an adapter of packed weights, A `[inputs, rank]` and B `[rank, outputs]`."""
        ...

    def adapted_rows(self, segments: Sequence[tuple[int, NativeAdapter | None]]) -> object:
        """Return rows that follow one another, so many with an adapter or with none."""
        ...

    def use_adapters(self, rows: object | None) -> object | None:
        """Let the operations that this thread builds from now on have these rows; return those before."""
        ...


class PackedLinears(AdaptedLinears):
    """Packed weights, by the paths of their layers.

    Operations know their adapters from when they are built, also where a block is one operation.
    """

    max_rank = 512

    def __init__(self, kernels: AdapterKernels, packed: Mapping[str, Any]) -> None:
        self._kernels = kernels
        self._packed = packed
        # The adapter, and the paths of its layers in its order.
        self._slots: dict[int, tuple[NativeAdapter, list[str]]] = {}

    @property
    def paths(self) -> Iterable[str]:
        return self._packed.keys()

    def put(self, slot: int, weights: Mapping[str, LowRank]) -> None:
        layers = [
            (self._packed[path], narrowed(each.a, each.dtype), narrowed(each.b, each.dtype))
            for path, each in weights.items()
        ]
        self._slots[slot] = self._kernels.adapter(layers), list(weights)

    def clear(self) -> None:
        self._slots.clear()

    def use(self, rows: CallRows | None) -> None:
        if rows is not None and self not in rows.memo:
            segments = [
                # A module may read a chunk token by token (Mamba); so one row stands for all.
                (1 if rows.is_chunk else each.num_rows, self._adapter(each.slot))
                for each in segments_of(rows)
            ]
            rows.memo[self] = self._kernels.adapted_rows(segments)
        self._kernels.use_adapters(None if rows is None else rows.memo[self])

    def _adapter(self, slot: int) -> NativeAdapter | None:
        return self._slots[slot][0] if slot else None

    def used(self, slot: int) -> set[str]:
        adapter, paths = self._slots[slot]
        return {paths[index] for index in adapter.touched()}
