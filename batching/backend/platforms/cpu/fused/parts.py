"""The parts of the halves of blocks, taken from a model's modules by name."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from batching.backend.host_array import host_array
from batching.backend.platforms.cpu.layers.linear import Linear
from batching.backend.platforms.cpu.layers.norms import LayerNorm, RMSNorm

# Groups of names, of which one is there.
OUTPUT: Final = (("o_proj",), ("out_proj",), ("dense",))
HEADS: Final = ("n_heads", "num_heads", "num_attention_heads")
_LIMIT: Final = re.compile("clip|clamp|limit")
# How far a half may be off, as a share of the largest change of x, by the bits that inputs of layers are
# rounded to: where it is not the same kernels as before, the seventh digit may differ, and be rounded to
# another integer.  A wrong guess is off by much more.
TOLERANCE: Final = {32: 1e-5, 16: 1e-3}


class UnknownPart(Exception):
    """A module has not the parts that its names would promise."""


class Parts:
    """The arrays and modules of a module, each to be taken once, and its numbers."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.left = set(module)

    def any_of(self, *groups: Sequence[str]) -> list[Any]:
        """Take the first group of which all are there."""
        return [self._module[name] for name in self.first_of(*groups)]

    def first_of(self, *groups: Sequence[str]) -> Sequence[str]:
        """Take it, and return its names."""
        names = next((group for group in groups if self.left.issuperset(group)), None)
        if names is None:
            raise UnknownPart(f"{type(self._module).__name__} has none of {groups}")
        self.left -= set(names)
        return names

    def maybe(self, groups: Sequence[Sequence[str]]) -> Any:
        has_one = any(self.left.issuperset(group) for group in groups)
        return self.any_of(*groups)[0] if has_one else None

    def maybe_all(self, *names: str) -> list[Any]:
        """Take all of these, or none."""
        return self.any_of(names) if self.left.issuperset(names) else []

    def number(self, names: Sequence[str], default: float | None = None) -> float:
        numbers = [getattr(self._module, name) for name in names if hasattr(self._module, name)]
        number = numbers[0] if numbers else default
        if not isinstance(number, int | float):
            raise UnknownPart(f"{type(self._module).__name__} has no number {names}")
        return number

    def end(self) -> None:
        """Raise UnknownPart if anything is left, or limits numbers that tried ones may not reach."""
        limits = {
            name for name, value in vars(self._module).items() if _LIMIT.search(name) and value
        }
        if self.left | limits:
            raise UnknownPart(f"{type(self._module).__name__} has {self.left | limits}, too")


@dataclass(frozen=True)
class Around:
    """The surroundings of a half in a block: norms, and the factor that its output is added to x with."""

    norm: nn.Module | None = None
    output_norm: nn.Module | None = None
    # 0: x is not added.
    residual: float = 0.0


NOTHING: Final = Around()
# A weight, eps, whether the mean is taken off, and a bias.
Norm = tuple[list[float], float, bool, list[float]]


class OfRows(NamedTuple):
    """Arguments that a model's code may pass beside its rows.

    factors: what their queries are multiplied by, of any shape.
    positions: theirs, if not those of the cache.
    """

    factors: mx.array | None = None
    positions: mx.array | None = None


AS_CACHED: Final = OfRows()


def layers_of(linears: Sequence[nn.Module]) -> list[tuple[Any, list[float]]]:
    """Return weights and biases; all layers except the last share one input."""
    if not all(type(linear) is Linear for linear in linears):
        raise UnknownPart("a layer is not linear")
    # Products of one input must be packed alike.
    if len({id(linear.product) for linear in linears[:-1]}) > 1:
        raise UnknownPart("layers of one input are stored in different ways")
    return [
        (linear.product.packed[linear.index], floats_of(linear.product.biases[linear.index]))
        for linear in linears
    ]


def norm_of(norm: nn.Module | None, size: int) -> Norm:
    """Return a weight, eps, whether the mean is taken off, and a bias, as the kernels take them."""
    if norm is None:
        return [], 0.0, False, []
    if type(norm) not in (RMSNorm, LayerNorm):
        raise UnknownPart(f"{type(norm).__name__} is not a norm")
    weight = floats_of(norm.get("weight")) or [1.0] * size
    return weight, norm.eps, type(norm) is LayerNorm, floats_of(norm.get("bias"))


def floats_of(array: mx.array | None) -> list[float]:
    return [] if array is None else host_array(array.astype(mx.float32)).tolist()
