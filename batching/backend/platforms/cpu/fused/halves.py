"""The halves of a transformer block, each one operation of the kernels.

What they are made of is guessed, by the names that mlx-lm's models have for it; see `blocks.py` for
what makes sure of it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

from batching.backend.hooks.soft_cap import soft_cap
from batching.backend.paged.layout import LayerShape
from batching.backend.paged.mlx_attention import SlidingWindow
from batching.backend.platforms.cpu.fused.parts import (
    AS_CACHED,
    HEADS,
    NOTHING,
    OUTPUT,
    TOLERANCE,
    Around,
    OfRows,
    Parts,
    UnknownPart,
    floats_of,
    layers_of,
    norm_of,
)
from batching.backend.platforms.cpu.layers.rotary import RoPE
from batching.backend.platforms.cpu.pools.cache import NativeLayerCache

# Groups of names, of which one is there.
_QKV: Final = (("q_proj", "k_proj", "v_proj"), ("q_proj", "k_proj"), ("qkv_proj",))
# Gate and up, both joined, or what is not gated.
_GATE_UP: Final = (
    *(("gate_proj", "up_proj"), ("w1", "w3"), ("gate_up_proj",)),
    *(("up_proj",), ("fc1",), ("c_fc",), ("input_linear",)),
)
_DOWN: Final = (("down_proj",), ("w2",), ("fc2",), ("c_proj",), ("output_linear",))
# A norm of this name comes after the rotation.
_LATE_NORM: Final = "query_layernorm"
_Q_NORM: Final = (("q_norm",), ("q_layernorm",), (_LATE_NORM,))
_K_NORM: Final = (("k_norm",), ("k_layernorm",), ("key_layernorm",))
_V_NORM: Final = (("v_norm",),)
_ROPE: Final = (("rope",), ("rotary_emb",))
_SINKS: Final = (("sinks",),)
_KEY_HEADS: Final = ("n_kv_heads", "num_kv_heads", "num_key_value_heads")
_SCALE: Final = ("scale", "sm_scale")
_Q_K_O: Final = 3
# The tolerance for an activation; the two forms of GELU differ by 5e-4.
_TOLERANCE: Final = 1e-5


class AttentionHalf:
    """Attention; `shape` is that of the cache that it takes."""

    def __init__(self, kernels: Any, attention: nn.Module, around: Around = NOTHING) -> None:
        parts = Parts(attention)
        linears = [*parts.any_of(*_QKV), *parts.any_of(*OUTPUT)]
        layers = layers_of(linears)
        rope, sinks = parts.maybe(_ROPE), parts.maybe(_SINKS)
        head_norms = [parts.maybe(groups) for groups in (_Q_NORM, _K_NORM, _V_NORM)]
        parts.end()
        heads = int(parts.number(HEADS))
        num_key_heads = int(parts.number(_KEY_HEADS, heads))
        outputs = sum(packed.shape[0] for packed, _ in layers[:-1])
        is_gated = _is_gated(layers, heads, num_key_heads)
        # MLX's sigmoid is another one than the kernels'.
        bits = linears[-1].product.input_bits if is_gated else 32
        self.tolerance = TOLERANCE[bits]
        # Two layers are of queries and of keys, which are the values, too.
        num_others = 1 if len(layers) == _Q_K_O else 2
        num_queries = 2 * heads if is_gated else heads
        dim = outputs // (num_queries + num_others * num_key_heads)
        self.size = layers[0][0].shape[1]
        cap = soft_cap(attention)
        self.shape = LayerShape(num_key_heads, dim, dim, mx.float32, soft_cap=cap)
        # Other modules are there where a layer has no rotary embedding.
        self._rope = rope if isinstance(rope, RoPE) else None
        self.rotates = True
        self._kernels = kernels
        self.half = kernels.attention(
            layers,
            [
                norm_of(around.norm, self.size),
                *(norm_of(norm, dim) for norm in head_norms),
                norm_of(around.output_norm, self.size),
            ],
            heads,
            parts.number(_SCALE, dim**-0.5),
            floats_of(sinks),
            around.residual,
            is_gated,
            _LATE_NORM in attention,
        )

    def takes(self, x: mx.array | None, cache: Any) -> bool:
        return (
            isinstance(cache, NativeLayerCache)
            and x is not None
            and not cache.shape.is_shared
            and not cache.shape.is_latent
            and cache.shape.soft_cap == self.shape.soft_cap
            and x.ndim == 3
            and x.shape[1] == 1
        )

    def __call__(
        self, x: mx.array, mask: Any, cache: NativeLayerCache, rows: OfRows = AS_CACHED
    ) -> mx.array:
        rope = self._rope if self.rotates else None
        positions = cache.offset if rows.positions is None else rows.positions
        angles = (None, None) if rope is None else rope.angles(positions)

        def run(pool: object, step: object, window: SlidingWindow) -> mx.array:
            is_traditional = rope is not None and rope.is_traditional
            attended: mx.array = self._kernels.run_attention(
                x,
                *angles,
                is_traditional,
                self.half,
                pool,
                step,
                *window,
                self.shape.soft_cap,
                None if rows.factors is None else rows.factors.flatten(),
            )
            return attended

        return cache.run_attention(run, mask)


class MlpHalf:
    """An MLP, gated or not."""

    def __init__(self, kernels: Any, mlp: nn.Module, around: Around = NOTHING) -> None:
        parts = Parts(mlp)
        names = parts.first_of(*_GATE_UP)
        (down,) = parts.first_of(*_DOWN)
        layers = layers_of([mlp[name] for name in (*names, down)])
        parts.end()
        self.size, width = layers[0][0].shape[1], layers[-1][0].shape[1]
        is_joined = len(names) == 1 and layers[0][0].shape[0] == 2 * width
        norms = [norm_of(norm, self.size) for norm in (around.norm, around.output_norm)]
        self._kernels = kernels
        activation = _activation(mlp, names, down, is_joined=is_joined)
        self.half = kernels.mlp(layers, norms, activation, around.residual)

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """residual: what the output is added to, if not to x."""
        output: mx.array = self._kernels.run_mlp(x, self.half, residual)
        return output


def _is_gated(layers: Sequence[tuple[Any, list[float]]], heads: int, num_key_heads: int) -> bool:
    """Return whether there is a gate beside each query, which has the size of a key."""
    if len(layers) == 2:
        return False
    queries, keys = (packed.shape[0] for packed, _ in layers[:2])
    return bool(queries * num_key_heads == 2 * heads * keys)


def _stand_in(output: mx.array | None, x: mx.array) -> mx.array:
    return x if output is None else output


def _activation(mlp: nn.Module, names: Sequence[str], down: str, *, is_joined: bool) -> int:
    """Return which activation an MLP's code has, with stand-ins for layers."""
    # The last ones are beyond what some limit them to.
    gate = mx.concatenate([mx.linspace(-6, 6, 64), mx.array([-1e3, 1e3, 1e3])])
    up = mx.concatenate([mx.linspace(1, 2, 65), mx.array([-1e3, 1e3])])
    outputs = [mx.concatenate([gate, up])] if is_joined else [gate, up]
    if len(names) == 1 and not is_joined:
        up = mx.ones_like(up)
    layers = {
        name: partial(_stand_in, output) for name, output in zip(names, outputs, strict=False)
    }
    layers[down] = partial(_stand_in, None)
    try:
        found = type(mlp).__call__(SimpleNamespace(**{**vars(mlp), **layers}), gate)
        for index, activate in enumerate(_activations()):
            if mx.allclose(found, activate(gate) * up, rtol=_TOLERANCE, atol=_TOLERANCE):
                return index
    except Exception as error:
        # Any code can be in a model file.
        raise UnknownPart(f"{type(mlp).__name__} does more than an MLP") from error
    raise UnknownPart(f"{type(mlp).__name__} has another activation")


def _activations() -> list[Callable[[mx.array], mx.array]]:
    """Return those that the kernels know, in their order."""
    return [nn.silu, nn.gelu_approx, nn.gelu, nn.relu, lambda x: mx.square(nn.relu(x))]
