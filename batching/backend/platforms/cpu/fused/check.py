"""Whether a fused path computes what the code of a model computes."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from batching.backend.hooks.changes import Changes
from batching.backend.hooks.sizes import shrink_sizes
from batching.backend.hooks.soft_cap import attend_capped, soft_cap
from batching.backend.host_array import host_array
from batching.backend.paged.kv_cache import StepInputs
from batching.backend.paged.mlx_attention import SlidingWindow
from batching.backend.platforms.cpu.fused.arguments import OfRowsNames
from batching.backend.platforms.cpu.fused.check_states import compare_states
from batching.backend.platforms.cpu.fused.halves import AttentionHalf, MlpHalf
from batching.backend.platforms.cpu.fused.latent import LatentHalf
from batching.backend.platforms.cpu.fused.mixture import MixtureHalf
from batching.backend.platforms.cpu.fused.parts import AS_CACHED, TOLERANCE, OfRows
from batching.backend.platforms.cpu.fused.recurrent import RecurrentHalf
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.platforms.cpu.pools.cache import (
    NativeAttention,
    NativeLayerCache,
    layer_cache,
)
from batching.block_manager import BlockTable
from batching.steps.step_plan import Slice

_NUM_ROWS: Final = 12
_BLOCK_SIZE: Final = 4
_BLOCKS: Final = (2, 0, 3)
# First positions, and windows.
_CASES: Final = ((0, None), (40, SlidingWindow(5)))
# A share of the largest output, from which x is subtracted.
_ROUNDING: Final = 1e-6
# In rows, what is added to them to find those whose experts are chosen by little, and how far the
# outputs of these then move.
_MAX_LEAPS: Final = 2
_NOISE: Final = 1e-5
_LEAP: Final = 1e-2

Fused = Callable[[mx.array, Any, Any, OfRows], mx.array]


class FusedAttention(Protocol):
    """size: of a row of x.  tolerance: see `halves.TOLERANCE`."""

    size: int
    tolerance: float

    def takes(self, x: mx.array | None, cache: Any) -> bool: ...

    def __call__(
        self, x: mx.array, mask: Any, cache: Any, rows: OfRows = AS_CACHED
    ) -> mx.array: ...


_Pooled = AttentionHalf | LatentHalf


class FusedCheck:
    """Compares modules on random rows, on a pool of the kernels, with what is to replace them.

    Both are the same kernels in the same order, so that next to nothing may differ in any precision.
    Modules of the same class and options compute the same, so one of them is compared.
    """

    def __init__(self, native: Native) -> None:
        self._native = native
        # And whether it rotates, of those that do compute it.
        self._known: dict[object, tuple[tuple[None, ...] | None, bool]] = {}

    def is_alike(self, module: nn.Module, half: MlpHalf | MixtureHalf) -> bool:
        """Tell whether what works row by row is what is to replace it."""
        key = (type(half), *map(_options, module.modules()))
        if key not in self._known:
            found = None
            # A model's code can raise anything.
            with suppress(Exception):
                found = compare(half.size, module, half)
            self._known[key] = (found, True)
        return self._known[key][0] is not None

    def others(
        self,
        module: nn.Module,
        attention: FusedAttention,
        fused: Fused,
        *,
        is_whole: bool = True,
    ) -> tuple[None, ...] | None:
        """Return None for each thing that a module returns beside its output; None if they differ."""
        key = (type(fused), is_whole, *map(_options, module.modules()))
        if key not in self._known:
            changes = Changes()
            shrink_sizes(module, changes)
            for each in module.modules():
                if soft_cap(each):
                    attend_capped(each, changes)
            self._known[key] = self._found(module, attention, fused)
            changes.undo()
        others, rotates = self._known[key]
        if isinstance(attention, _Pooled):
            attention.rotates = rotates
        return others

    def _found(
        self, module: nn.Module, attention: FusedAttention, fused: Fused
    ) -> tuple[tuple[None, ...] | None, bool]:
        # A model's code can do anything with a cache, so it can raise anything.
        with suppress(Exception):
            if isinstance(attention, RecurrentHalf):
                is_alike = compare_states(self._native, module, attention, fused)
                return (() if is_alike else None), True
            assert isinstance(attention, _Pooled)
            # Some layers have a rotary embedding and do not use it (Cohere 2).
            for attention.rotates in (True, False):
                compared = [self._compare(module, attention, fused, *case) for case in _CASES]
                if None not in compared:
                    return compared[0], attention.rotates
        return None, True

    def _compare(
        self,
        module: nn.Module,
        attention: _Pooled,
        fused: Fused,
        start: int,
        window: SlidingWindow | None,
    ) -> tuple[None, ...] | None:
        if attention.shape.is_latent:
            window = None
        names = OfRowsNames.of(module)
        factors = np.random.default_rng(start).uniform(0.5, 2, (_NUM_ROWS, 1, 1, 1))
        rows = OfRows(
            mx.array(factors, mx.float32) if names.factors else None,
            self._cache(attention, start).offset if names.positions else None,
        )
        named = {name: value for name, value in zip(names, rows, strict=True) if name}

        def run_plain(x: mx.array) -> Any:
            return module(x, mask=window, cache=self._cache(attention, start), **named)

        def run_fused(x: mx.array) -> mx.array:
            return fused(x, window, self._cache(attention, start), rows)

        return compare(attention.size, run_plain, run_fused, attention.tolerance)

    def _cache(self, attention: _Pooled, start: int) -> NativeLayerCache:
        cache = layer_cache(self._native, attention.shape, max(_BLOCKS) + 1, _BLOCK_SIZE)
        probe = Slice(0, 0, (0,) * _NUM_ROWS, BlockTable(_BLOCKS).value)
        rows = NativeAttention(self._native, [probe], _BLOCK_SIZE)
        step = StepInputs.of(rows, _BLOCK_SIZE)
        cache.begin(replace(step, positions=step.positions + start))
        return cache


def compare(
    size: int,
    plain: Callable[[mx.array], Any],
    fused: Callable[[mx.array], mx.array],
    tolerance: float = TOLERANCE[32],
) -> tuple[None, ...] | None:
    """Return what `plain` returns beside its output as None each; None if the outputs differ.

    Experts might be chosen by the last bit: a few rows may differ of which the output changes by
    leaps.
    """
    rng = np.random.default_rng(0)
    x, noise = (mx.array(rng.standard_normal((_NUM_ROWS, 1, size)), mx.float32) for _ in range(2))
    expected, others = _parted(plain(x))
    output = fused(x)
    change, largest = (float(mx.abs(array).max()) for array in (expected - x, expected))
    differ = _distances(output, expected) > tolerance * change + _ROUNDING * largest
    differ |= np.isnan(_distances(output, expected))
    if differ.any():
        moved = [_distances(fused(x + sign * _NOISE * noise), output) for sign in (1, -1)]
        leaps = np.maximum(*moved) > _LEAP * change
        if differ.sum() > _MAX_LEAPS or (differ & ~leaps).any():
            return None
    return others


def _distances(rows: mx.array, others: mx.array) -> npt.NDArray[np.float32]:
    return host_array(mx.abs(rows - others).max(axis=(1, 2)))


def _parted(returned: Any) -> tuple[mx.array, tuple[None, ...]]:
    """Return an output, and None for what attention also returns for layers that share its keys."""
    match returned:
        case mx.array():
            return returned, ()
        case (mx.array() as output, (mx.array(), mx.array()), _):
            return output, (None, None)
    raise TypeError("neither an output nor one with keys, values and positions")


def _options(module: nn.Module) -> tuple[Any, ...]:
    """Return all that modules of a class can differ in but their weights."""
    values = {name: value for name, value in vars(module).items() if name != "layer_idx"}
    numbers = [(k, v) for k, v in values.items() if isinstance(v, int | float | str | None)]
    shapes = [(k, v.shape) for k, v in module.items() if isinstance(v, mx.array)]
    return type(module).__name__, type(module).__module__, tuple(numbers), tuple(shapes)
