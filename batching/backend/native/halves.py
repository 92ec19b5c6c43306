"""The halves of a transformer block, each one operation of the kernels.

What they are made of is guessed, by the names that mlx-lm's models have for it; see `blocks.py` for
what makes sure of it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from batching.backend.hooks.soft_cap import soft_cap
from batching.backend.native.cache import NativeLayerCache
from batching.backend.native.modules import Linear
from batching.backend.native.norms import RMSNorm
from batching.backend.native.rotary import RoPE

# Groups of names, of which one is there.
_QKV: Final = (("q_proj", "k_proj", "v_proj"), ("q_proj", "k_proj"), ("qkv_proj",))
_GATE_UP: Final = (("gate_proj", "up_proj"), ("w1", "w3"), ("gate_up_proj",))
_O: Final = (("o_proj",), ("out_proj",), ("dense",))
_DOWN: Final = (("down_proj",), ("w2",))
_Q_NORM: Final = (("q_norm",), ("q_layernorm",))
_K_NORM: Final = (("k_norm",), ("k_layernorm",))
_V_NORM: Final = (("v_norm",),)
_ROPE: Final = (("rope",), ("rotary_emb",))
_SINKS: Final = (("sinks",),)
_HEADS: Final = ("n_heads", "num_heads", "num_attention_heads")
_KEY_HEADS: Final = ("n_kv_heads", "num_kv_heads", "num_key_value_heads")
_SCALE: Final = ("scale", "sm_scale")
_LIMIT: Final = re.compile("clip|clamp|limit")
_Q_K_O: Final = 3
# The two forms of GELU differ by 5e-4.
_TOLERANCE: Final = 1e-5
# How far a half may be off, as a share of the largest change of x, by the bits that inputs of layers are
# rounded to: where it is not the same kernels as before, the seventh digit may differ, and be rounded to
# another integer.  A wrong guess is off by much more.
TOLERANCE: Final = {32: 1e-5, 16: 1e-3, 8: 5e-2}


class UnknownPart(Exception):
    """A module has not the parts that its names would promise."""


class Parts:
    """The arrays and modules of a module, each to be taken once, and its numbers."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.left = set(module)

    def any_of(self, *groups: Sequence[str]) -> list[Any]:
        """Take the first group of which all are there."""
        names = next((group for group in groups if self.left.issuperset(group)), None)
        if names is None:
            raise UnknownPart(f"{type(self._module).__name__} has none of {groups}")
        self.left -= set(names)
        return [self._module[name] for name in names]

    def maybe(self, groups: Sequence[Sequence[str]]) -> Any:
        has_one = any(self.left.issuperset(group) for group in groups)
        return self.any_of(*groups)[0] if has_one else None

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
    """What is around a half in a block: norms, and the factor that its output is added to x with."""

    norm: nn.Module | None = None
    output_norm: nn.Module | None = None
    # 0: x is not added.
    residual: float = 0.0


NOTHING: Final = Around()


class AttentionHalf:
    """Attention; `num_key_heads`, `head_dim` and `soft_cap` are of the cache that it takes."""

    def __init__(self, kernels: Any, attention: nn.Module, around: Around = NOTHING) -> None:
        parts = Parts(attention)
        linears = [*parts.any_of(*_QKV), *parts.any_of(*_O)]
        layers = layers_of(linears)
        rope, sinks = parts.maybe(_ROPE), parts.maybe(_SINKS)
        head_norms = [parts.maybe(groups) for groups in (_Q_NORM, _K_NORM, _V_NORM)]
        parts.end()
        heads = int(parts.number(_HEADS))
        self.num_key_heads = int(parts.number(_KEY_HEADS, heads))
        outputs = sum(packed.shape[0] for packed, _ in layers[:-1])
        self.is_gated = _is_gated(layers, heads, self.num_key_heads)
        # MLX's sigmoid is another one than the kernels'.
        bits = linears[-1].product.input_bits if self.is_gated else 32
        self.tolerance = TOLERANCE[bits]
        # Two layers are of queries and of keys, which are the values, too.
        num_others = 1 if len(layers) == _Q_K_O else 2
        num_queries = 2 * heads if self.is_gated else heads
        self.head_dim = outputs // (num_queries + num_others * self.num_key_heads)
        self.size = layers[0][0].shape[1]
        self.soft_cap = soft_cap(attention)
        # Other modules are there where a layer has no rotary embedding.
        self._rope = rope if isinstance(rope, RoPE) else None
        self._is_traditional = self._rope is not None and self._rope.is_traditional
        self._run = kernels.run_attention
        self.half = kernels.attention(
            layers,
            [
                norm_of(around.norm, self.size),
                *(norm_of(norm, self.head_dim) for norm in head_norms),
                norm_of(around.output_norm, self.size),
            ],
            heads,
            parts.number(_SCALE, self.head_dim**-0.5),
            floats_of(sinks),
            around.residual,
            self.is_gated,
        )

    def takes(self, x: mx.array | None, cache: Any) -> bool:
        return (
            isinstance(cache, NativeLayerCache)
            and x is not None
            and not cache.shape.is_shared
            and cache.shape.soft_cap == self.soft_cap
            and x.ndim == 3
            and x.shape[1] == 1
        )

    def __call__(self, x: mx.array, mask: Any, cache: NativeLayerCache) -> mx.array:
        rope = self._rope
        cosines, sines = (None, None) if rope is None else rope.angles(cache.offset)
        attended: mx.array = self._run(
            x,
            cosines,
            sines,
            self._is_traditional,
            self.half,
            *cache.fused_inputs(mask),
            self.soft_cap,
        )
        cache.attended = attended
        return attended


class MlpHalf:
    """A gated MLP."""

    def __init__(self, kernels: Any, mlp: nn.Module, around: Around = NOTHING) -> None:
        parts = Parts(mlp)
        layers = layers_of([*parts.any_of(*_GATE_UP), *parts.any_of(*_DOWN)])
        parts.end()
        size = layers[0][0].shape[1]
        norms = [norm_of(norm, size) for norm in (around.norm, around.output_norm)]
        self._run = kernels.run_mlp
        self.half = kernels.mlp(layers, norms, _is_gelu(mlp), around.residual)

    def __call__(self, x: mx.array) -> mx.array:
        output: mx.array = self._run(x, self.half)
        return output


def layers_of(linears: Sequence[nn.Module]) -> list[tuple[Any, list[float]]]:
    """Return weights and biases; but for the last, the layers share one input."""
    if not all(type(linear) is Linear for linear in linears):
        raise UnknownPart("a layer is not linear")
    # Products of one input must be packed alike.
    if len({id(linear.product) for linear in linears[:-1]}) > 1:
        raise UnknownPart("layers of one input are stored in different ways")
    return [
        (linear.product.packed[linear.index], floats_of(linear.product.biases[linear.index]))
        for linear in linears
    ]


def _is_gated(layers: Sequence[tuple[Any, list[float]]], heads: int, num_key_heads: int) -> bool:
    """Return whether there is a gate beside each query, which has the size of a key."""
    if len(layers) == 2:
        return False
    queries, keys = (packed.shape[0] for packed, _ in layers[:2])
    return bool(queries * num_key_heads == 2 * heads * keys)


def norm_of(norm: nn.Module | None, size: int) -> tuple[list[float], float]:
    if norm is None:
        return [], 0.0
    if type(norm) is not RMSNorm:
        raise UnknownPart(f"{type(norm).__name__} is not RMSNorm")
    return floats_of(norm.get("weight")) or [1.0] * size, norm.eps


def floats_of(array: mx.array | None) -> list[float]:
    return [] if array is None else np.array(array.astype(mx.float32)).tolist()


def _stand_in(output: mx.array | None, x: mx.array) -> mx.array:
    return x if output is None else output


def _is_gelu(mlp: nn.Module) -> bool:
    """Return whether a gated MLP has GELU and not SiLU, as its code does with stand-ins for layers."""
    # The last ones are beyond what some limit them to.
    gate = mx.concatenate([mx.linspace(-6, 6, 64), mx.array([-1e3, 1e3, 1e3])])
    up = mx.concatenate([mx.linspace(1, 2, 65), mx.array([-1e3, 1e3])])
    outputs = [(gate, up), (gate, up), (mx.concatenate([gate, up]),)]
    layers = {
        name: partial(_stand_in, output)
        for names, group in zip(_GATE_UP, outputs, strict=True)
        for name, output in zip(names, group, strict=True)
    }
    layers |= {name: partial(_stand_in, None) for (name,) in _DOWN}
    try:
        found = type(mlp).__call__(SimpleNamespace(**vars(mlp), **layers), gate)
        for is_gelu, activate in enumerate((nn.silu, nn.gelu_approx)):
            if mx.allclose(found, activate(gate) * up, rtol=_TOLERANCE, atol=_TOLERANCE):
                return bool(is_gelu)
    except Exception as error:
        # Any code can be in a model file.
        raise UnknownPart(f"{type(mlp).__name__} does more than a gated MLP") from error
    raise UnknownPart(f"{type(mlp).__name__} has another activation")
