"""Modules of an mlx-lm model, replaced by ones that do the same faster on a CPU.

A replaced module keeps its class's name and parameters: its class becomes a subclass, as in
`batching.backend.hooks.undo`.  What is not exactly the class meant here stays as it is.
"""

import sys
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx_lm.models import activations
from mlx_lm.models.activations import swiglu as mlx_swiglu

Floats = npt.NDArray[np.float32]

# Below it, leaving MLX's graph costs more than its scalar loop.
_MIN_SWIGLU_SIZE: Final = 4096
# OpenBLAS reads a matrix of more rows at 16 to 20 GB/s, smaller ones at 33 (one-row products).
_MAX_ROWS: Final = 768


def replace_modules(model: nn.Module) -> None:
    """Replace what is float32; the model computes the same, up to rounding."""
    rotation = Rotation()
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype == mx.float32:
            module.__class__ = Linear
        elif type(module) is nn.Embedding and module.weight.dtype == mx.float32:
            module.__class__ = Embedding
        elif type(module) is nn.RoPE:
            module.__class__ = RoPE
            module.rotation = rotation
            module.frequencies = plain_frequencies(module.dims, module.base, module.scale)
    # The models import the function by name, so it is their names that are rebound.
    for name in {type(module).__module__ for module in model.modules()} - {activations.__name__}:
        names = vars(sys.modules[name])
        if names.get("swiglu") is mlx_swiglu:
            names["swiglu"] = swiglu


class Linear(nn.Linear):
    def __call__(self, x: mx.array) -> mx.array:
        result = _product(x, self.weight)
        if "bias" in self:
            result = result + self.bias
        # The product runs while Python makes the graph of what follows it.
        mx.async_eval(result)
        return result


class Embedding(nn.Embedding):
    def as_linear(self, x: mx.array) -> mx.array:
        return _product(x, self.weight)


def _product(x: mx.array, weight: mx.array) -> mx.array:
    """Return `x @ weight.T`."""
    num_outputs, num_inputs = weight.shape
    if x.size != num_inputs or num_outputs <= _MAX_ROWS:
        return x @ weight.T
    parts = weight.reshape(_num_parts(num_outputs), -1, num_inputs).swapaxes(1, 2)
    return (x.reshape(1, 1, num_inputs) @ parts).reshape(*x.shape[:-1], num_outputs)


@cache
def _num_parts(num_rows: int) -> int:
    """Return into how many equal parts of at most `_MAX_ROWS` a matrix can be cut; 1 if none."""
    candidates = range(-(-num_rows // _MAX_ROWS), num_rows // (_MAX_ROWS // 4) + 1)
    return next((n for n in candidates if num_rows % n == 0), 1)


class RoPE(nn.RoPE):
    """Rotary embedding (Su et al. 2021), with the angles of a step computed once.

    MLX's own computes the angles for every head of every layer again.
    """

    rotation: "Rotation"
    frequencies: "Frequencies"

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        is_step = isinstance(offset, mx.array) and offset.ndim == 1 and x.shape[-2] == 1
        if not is_step or x.dtype != mx.float32:
            rotated: mx.array = super().__call__(x, offset)
            return rotated
        angles = self.rotation.angles(offset, self.frequencies)
        axis = -1 if self.traditional else -2
        if len(x) == 1:
            return _rotate_one(x, angles, axis)
        mx.eval(x)
        return mx.array(_rotate(np.asarray(x), angles, axis))


@dataclass(frozen=True, eq=False)
class Frequencies:
    """The radians by which pairs turn from a position to the next, and a factor for what is rotated."""

    radians: npt.NDArray[np.float64]
    factor: float = 1.0


# Equal ones are one object, so that layers share their angles.
@cache
def plain_frequencies(dims: int, base: float, scale: float) -> Frequencies:
    return Frequencies(scale * base ** (-np.arange(0, dims, 2) / dims))


@cache
def tabulated_frequencies(periods: tuple[float, ...], factor: float) -> Frequencies:
    return Frequencies(1 / np.array(periods), factor)


class Rotation:
    """The angles of the latest positions.

    All layers of a step use one and the same array of positions.
    """

    def __init__(self) -> None:
        self._positions: mx.array | None = None
        self._angles: dict[Frequencies, Angles] = {}

    def angles(self, positions: mx.array, frequencies: Frequencies) -> "Angles":
        if positions is not self._positions:
            self._positions, self._angles = positions, {}
        if frequencies not in self._angles:
            radians = np.array(positions)[:, None, None, None] * frequencies.radians
            cosines, sines = (
                (frequencies.factor * turned).astype(np.float32)
                for turned in (np.cos(radians), np.sin(radians))
            )
            self._angles[frequencies] = Angles(cosines, sines)
        return self._angles[frequencies]


@dataclass(frozen=True)
class Angles:
    """`[T, 1, 1, dims / 2]` each, times the factor."""

    cosines: Floats
    sines: Floats

    @cached_property
    def in_graph(self) -> tuple[mx.array, mx.array]:
        return mx.array(self.cosines), mx.array(self.sines)


def _rotate(x: Floats, angles: Angles, axis: int) -> Floats:
    """Rotate the first dims of `[T, H, 1, head_dim]`; a pair is two neighbours or halves apart."""
    rotated = np.array(x)
    dims = 2 * angles.cosines.shape[-1]
    first, second = _pair(x[..., :dims], axis)
    new_first, new_second = _pair(rotated[..., :dims], axis)
    np.multiply(first, angles.cosines, out=new_first)
    new_first -= second * angles.sines
    np.multiply(second, angles.cosines, out=new_second)
    new_second += first * angles.sines
    return rotated


def _pair(x: Floats, axis: int) -> tuple[Floats, Floats]:
    """Return views of the first and the second of all pairs."""
    half = x.shape[-1] // 2
    return (x[..., ::2], x[..., 1::2]) if axis == -1 else (x[..., :half], x[..., half:])


def _rotate_one(x: mx.array, angles: Angles, axis: int) -> mx.array:
    """Rotate one row in MLX's graph: so little is not worth an evaluation."""
    cosines, sines = angles.in_graph
    half = cosines.shape[-1]
    pairs = x[..., : 2 * half].reshape(*x.shape[:-1], *((half, 2) if axis == -1 else (2, half)))
    first, second = mx.split(pairs, 2, axis=axis)
    cosines, sines = mx.expand_dims(cosines, axis), mx.expand_dims(sines, axis)
    rotated = mx.concatenate(
        [first * cosines - second * sines, second * cosines + first * sines], axis=axis
    ).flatten(-2)
    rest = x[..., 2 * half :]
    return mx.concatenate([rotated, rest], axis=-1) if rest.size else rotated


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Return silu(gate) * x (SwiGLU, Shazeer 2020)."""
    is_float32 = gate.dtype == x.dtype == mx.float32
    if not is_float32 or gate.size < _MIN_SWIGLU_SIZE or mx.default_device() != mx.cpu:
        result: mx.array = mlx_swiglu(gate, x)
        return result
    mx.eval(gate, x)
    host_gate = np.asarray(gate)
    product = np.negative(host_gate)
    with np.errstate(over="ignore"):
        np.exp(product, out=product)
    product += 1
    np.divide(host_gate, product, out=product)
    product *= np.asarray(x)
    return mx.array(product)
