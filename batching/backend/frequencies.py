"""By what rotary embeddings turn pairs (Su et al. 2021), read from the modules of a model."""

from dataclasses import dataclass
from functools import cache
from typing import Final

import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from batching.backend.hooks.changes import unchanged_class

# Attributes of a rotary embedding with a table: the table, and a factor that may scale the rotated numbers.
_TABLE: Final = "_freqs"
_FACTORS: Final = ("_scale", "mscale")


@dataclass(frozen=True, eq=False)
class Frequencies:
    """The radians by which pairs turn from a position to the next, and a factor for what is rotated."""

    radians: npt.NDArray[np.float64]
    factor: float = 1.0


def frequencies_of(module: nn.Module) -> Frequencies | None:
    """Return by what a rotary embedding turns pairs; None if a module is none, or one of another kind."""
    if unchanged_class(module) is nn.RoPE:
        return _plain(module.dims, module.base, module.scale)
    if set(module) != {_TABLE} or module[_TABLE].ndim != 1:
        return None
    factors = [getattr(module, name) for name in _FACTORS if hasattr(module, name)]
    return _tabulated(tuple(module[_TABLE].tolist()), factors[0] if factors else 1.0)


# Equal ones are one object, so that layers share their angles.
@cache
def _plain(dims: int, base: float, scale: float) -> Frequencies:
    return Frequencies(scale * base ** (-np.arange(0, dims, 2) / dims))


@cache
def _tabulated(periods: tuple[float, ...], factor: float) -> Frequencies:
    return Frequencies(1 / np.array(periods), factor)
