"""RMSNorm and LayerNorm by whatever class: with weights, with 1 + weights (Gemma), or with none."""

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np

# `dims` is that of nn.LayerNorm; what it normalizes has so many numbers, too.
_ATTRIBUTES: Final = {"eps", "dims"}
_TOLERANCE: Final = 1e-4
_SIZE: Final = 64


class RMSNorm(nn.Module):
    kernels: Any

    def __call__(self, x: mx.array) -> mx.array:
        normed: mx.array = self.kernels.rms_norm(x, self.get("weight"), self.eps)
        return normed


class LayerNorm(nn.Module):
    kernels: Any

    def __call__(self, x: mx.array) -> mx.array:
        normed: mx.array = self.kernels.layer_norm(
            x, self.get("weight"), self.get("bias"), self.eps
        )
        return normed


def replace_norm(module: nn.Module, kernels: Any) -> None:
    """Make a module of float32 whose class computes a norm one that the kernels compute."""
    kind, offset = _kind_of(module)
    if kind is None:
        return
    if (weight := module.get("weight")) is not None:
        module.weight = weight + offset
    module.__class__ = kind
    module.kernels = kernels


def rms_norm_offset(module: nn.Module) -> float | None:
    """Return what an RMSNorm with weights adds to these; None if a module is no such norm."""
    kind, offset = _kind_of(module)
    return offset if kind is RMSNorm and "weight" in module else None


def _kind_of(module: nn.Module) -> tuple[type[nn.Module] | None, float]:
    """Return which norm a module is, if it is one, and what it adds to its weights."""
    attributes = {name for name in vars(module) if not name.startswith("_")}
    arrays = frozenset(module)
    if "eps" not in attributes or attributes - _ATTRIBUTES or not arrays <= {"weight", "bias"}:
        return None, 0.0
    weight = module.get("weight")
    if weight is not None and weight.ndim != 1:
        return None, 0.0
    return _kind(type(module), arrays)


@cache
def _kind(plain: type[nn.Module], arrays: frozenset[str]) -> tuple[type[nn.Module] | None, float]:
    """Return which norm a class is, if it is one, and what it adds to its weights."""
    rng = np.random.default_rng(0)
    # In the second row, eps is what counts.
    x = mx.array(rng.standard_normal((2, _SIZE)) * [[1.0], [1e-3]] + [[0.5], [0.0]], mx.float32)
    stand_in = plain.__new__(plain)
    nn.Module.__init__(stand_in)
    stand_in.eps, stand_in.dims = 1e-6, _SIZE
    for name in sorted(arrays):
        stand_in[name] = mx.array(rng.standard_normal(_SIZE), mx.float32)
    weight, bias = stand_in.get("weight"), stand_in.get("bias")
    computed = _computed(plain.__call__, stand_in, x)
    for offset in (0.0, 1.0) if weight is not None else (0.0,):
        scale = None if weight is None else weight + offset
        for kind, expected in _expected(x, scale, bias, stand_in.eps):
            if computed is not None and float(mx.abs(computed - expected).max()) < _TOLERANCE:
                return kind, offset
    return None, 0.0


def _expected(
    x: mx.array, scale: mx.array | None, bias: mx.array | None, eps: float
) -> Iterator[tuple[type[nn.Module], mx.array]]:
    if bias is None:
        yield RMSNorm, mx.fast.rms_norm(x, scale, eps)
    yield LayerNorm, mx.fast.layer_norm(x, scale, bias, eps)


def _computed(call: Callable[..., Any], module: nn.Module, x: mx.array) -> mx.array | None:
    """Return what a module computes from one array, if it takes no more and returns one."""
    if len(inspect.signature(call).parameters) != 2:
        return None
    try:
        computed = call(module, x)
        mx.eval(computed)
    except Exception:
        # Any code can be in a model file.
        return None
    is_like = isinstance(computed, mx.array) and computed.shape == x.shape
    return computed if is_like else None
