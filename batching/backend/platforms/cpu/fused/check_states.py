"""Whether a fused recurrent path computes what the code of a model computes."""

from collections.abc import Callable
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache

from batching.backend.paged.kv_cache import StepInputs
from batching.backend.platforms.cpu.fused.parts import AS_CACHED, OfRows
from batching.backend.platforms.cpu.fused.recurrent import RecurrentHalf
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.platforms.cpu.pools.cache import NativeAttention
from batching.backend.platforms.cpu.pools.states import NativeStates, StateCells
from batching.block_manager import BlockTable
from batching.steps.step_plan import Slice

_NUM_ROWS: Final = 12
_BLOCK_SIZE: Final = 4
# A chunk in which a state is kept, a decode, and a chunk shorter than what a convolution keeps.
_SLICES: Final = ((0, 9, (3,)), (9, 10, ()), (10, 12, ()))
# A share of the largest output, from which x is subtracted.
_ROUNDING: Final = 1e-6


def compare_states(
    native: Native,
    module: nn.Module,
    half: RecurrentHalf,
    fused: Callable[[mx.array, Any, Any, OfRows], mx.array],
) -> bool:
    """Compare outputs of successive slices of random rows, each with the states of the one before."""
    rng = np.random.default_rng(0)
    x = mx.array(rng.standard_normal((_NUM_ROWS, 1, half.size)), mx.float32)
    blocks = BlockTable(range(_NUM_ROWS)).value
    cache, own = NativeStates(0, StateCells(native), is_first=True), ArraysCache(half.num_arrays)
    plain, outputs = [], []
    for start, stop, keep in _SLICES:
        rows = x[start:stop]
        plain.append(module(rows.swapaxes(0, 1), mask=None, cache=own).swapaxes(0, 1))
        read = Slice(0, start, (0,) * (stop - start), blocks, state_slot=0, keep=keep)
        attention = NativeAttention(native, [read], _BLOCK_SIZE)
        cache.begin(StepInputs.of(attention, _BLOCK_SIZE))
        outputs.append(fused(rows, None, cache, AS_CACHED))
        mx.eval(outputs)
        cache.flush()
    expected = mx.concatenate(plain)
    difference = float(mx.abs(mx.concatenate(outputs) - expected).max())
    change, size = (float(mx.abs(array).max()) for array in (expected - x, expected))
    return difference <= half.tolerance * change + _ROUNDING * size
