"""The recurrent half of a hybrid model's block as one operation: gated delta nets.

As in `halves.py`, what they are made of is guessed by names, and `check_states.py` makes sure of it.
"""

from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from batching.backend.native.fused.parts import (
    AS_CACHED,
    NOTHING,
    TOLERANCE,
    Around,
    OfRows,
    Parts,
    UnknownPart,
    floats_of,
    norm_of,
)
from batching.backend.native.layers.linear import Linear
from batching.backend.native.layers.recurrent import Conv1d
from batching.backend.native.pools.states import NativeStates

# Layers of one input: q, k and v, z, b and a; or joined by key heads.
_LAYERS: Final = (
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
)
_NORM_EPS: Final = 1e-6

# A layer, and the first column and the stride of key heads there.
_Columns = tuple[int, int, int]


class LinearAttentionHalf:
    """A gated delta net, on states that the kernels keep."""

    # Of the cache of mlx-lm.
    num_arrays = 2

    def __init__(self, kernels: Any, module: nn.Module, around: Around = NOTHING) -> None:
        parts = Parts(module)
        inputs = parts.any_of(*_LAYERS)
        convolution, a_log, dt_bias, norm, output = parts.any_of(
            ("conv1d", "A_log", "dt_bias", "norm", "out_proj")
        )
        parts.end()
        sizes = (
            int(parts.number([name]))
            for name in ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
        )
        linears = [*inputs, output]
        layers = [_layer(kernels, linear) for linear in linears]
        self.size = layers[0][0].shape[1]
        bits = [linear.product.input_bits for linear in linears if type(linear) is Linear]
        self.tolerance = TOLERANCE[min(bits, default=32)]
        self._kernels = kernels
        norms = [norm_of(each, self.size) for each in (around.norm, around.output_norm)]
        try:
            self._mixer = kernels.delta_mixer(
                layers,
                [norms[0], (floats_of(norm.weight), float(norm.eps), False, []), norms[1]],
                taps=_taps(convolution),
                decay=floats_of(mx.exp(a_log.astype(mx.float32))),
                dt_bias=floats_of(dt_bias),
                residual=around.residual,
                **_sizes(len(inputs) > 2, *sizes),
            )
        except (ArithmeticError, AttributeError, ValueError) as error:
            raise UnknownPart(f"the parts of {type(module).__name__} do not fit") from error

    def takes(self, x: mx.array | None, cache: Any) -> bool:
        return isinstance(cache, NativeStates) and x is not None and x.ndim == 3 and x.shape[1] == 1

    def __call__(
        self, x: mx.array, mask: Any, cache: NativeStates, rows: OfRows = AS_CACHED
    ) -> mx.array:
        def run(pool: object, step: object) -> mx.array:
            mixed: mx.array = self._kernels.run_delta_mixer(x, self._mixer, pool, step)
            return mixed

        return cache.run(self._mixer.pool, run)


def _sizes(
    is_apart: bool, key_heads: int, heads: int, key_dim: int, value_dim: int
) -> dict[str, Any]:
    scale = key_dim**-0.5
    return {
        "columns": _columns(is_apart, key_heads, heads // key_heads, key_dim, value_dim),
        "heads": (key_heads, heads),
        "dims": (key_dim, value_dim),
        "scales": (scale**2, scale),
        "eps": _NORM_EPS * scale**2,
    }


def _columns(
    is_apart: bool, key_heads: int, group: int, key_dim: int, value_dim: int
) -> list[_Columns]:
    """Return where q, k, v, z, b and a are."""
    values = group * value_dim
    if is_apart:
        keys = key_heads * key_dim
        qkv = [(0, 0, key_dim), (0, keys, key_dim), (0, 2 * keys, values)]
        return [*qkv, (1, 0, values), (2, 0, group), (3, 0, group)]
    of_head = 2 * key_dim + 2 * values
    firsts = (0, key_dim, 2 * key_dim, 2 * key_dim + values)
    return [*((0, first, of_head) for first in firsts), (1, 0, 2 * group), (1, group, 2 * group)]


def _layer(kernels: Any, layer: nn.Module) -> tuple[Any, list[float]]:
    if type(layer) is nn.Linear:
        # Too thin to be replaced.
        return kernels.pack(layer.weight), floats_of(layer.get("bias"))
    if type(layer) is not Linear:
        raise UnknownPart("a layer is not linear")
    return layer.product.packed[layer.index], floats_of(layer.product.biases[layer.index])


def _taps(convolution: nn.Module) -> list[float]:
    if type(convolution) is not Conv1d or "bias" in convolution:
        raise UnknownPart("the convolution is of another kind")
    return np.array(convolution.weight[..., 0].T.astype(mx.float32)).ravel().tolist()
