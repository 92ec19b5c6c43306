"""Transformer blocks of the llama family, each computed by one operation.

The blocks of `llama`, `qwen2` and `qwen3` compute the same: attention with rotary embedding, then a
gated MLP, each after an RMSNorm and with a residual connection.
"""

from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import llama, qwen2, qwen3

from batching.backend.native.cache import NativeLayerCache
from batching.backend.native.modules import Linear, RMSNorm, RoPE
from batching.backend.paged.mlx_attention import SlidingWindow

_CLASSES: Final = {
    module.TransformerBlock: (module.Attention, module.MLP) for module in (llama, qwen2, qwen3)
}
_PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP: Final = ("gate_proj", "up_proj", "down_proj")


def replace_blocks(model: nn.Module, kernels: Any) -> None:
    """Make blocks whose modules are all replaced run as one operation on the kernels' pool."""
    for module in model.modules():
        if _is_known(module):
            module.__class__ = _block_class(type(module))
            module.fused = FusedBlock(kernels, module)


def _is_known(module: nn.Module) -> bool:
    if type(module) not in _CLASSES:
        return False
    attention, mlp = module.self_attn, module.mlp
    linears = [attention[name] for name in _PROJECTIONS] + [mlp[name] for name in _MLP]
    norms = [module.input_layernorm, module.post_attention_layernorm]
    norms += [attention[name] for name in ("q_norm", "k_norm") if name in attention]
    return (
        (type(attention), type(mlp)) == _CLASSES[type(module)]
        and all(type(linear) is Linear for linear in linears)
        and all(type(norm) is RMSNorm for norm in norms)
        and type(attention.rope) is RoPE
        # Products of one input must be packed alike.
        and attention.q_proj.product is attention.k_proj.product is attention.v_proj.product
        and mlp.gate_proj.product is mlp.up_proj.product
    )


class FusedBlock:
    """A block of the kernels."""

    def __init__(self, kernels: Any, block: nn.Module) -> None:
        attention, mlp = block.self_attn, block.mlp
        linears = [attention[name] for name in _PROJECTIONS] + [mlp[name] for name in _MLP]
        norms = [block.input_layernorm, block.post_attention_layernorm]
        norms += [attention.get("q_norm"), attention.get("k_norm")]
        self._kernels = kernels
        self._rope = attention.rope
        self._block = kernels.block(
            [linear.product.packed[linear.index] for linear in linears],
            [_floats(linear.product.biases[linear.index]) for linear in linears],
            [[] if norm is None else _floats(norm.weight) for norm in norms],
            [0.0 if norm is None else norm.eps for norm in norms],
            attention.n_heads,
            attention.scale,
        )

    def __call__(
        self, x: mx.array, mask: SlidingWindow | None, cache: NativeLayerCache
    ) -> mx.array:
        angles = self._rope.angles(cache.offset)
        return cache.run_block(
            lambda pool, step, window: self._kernels.run_block(
                x, *angles, self._rope.traditional, self._block, pool, step, window
            ),
            mask,
        )


def _floats(array: mx.array | None) -> list[float]:
    return [] if array is None else np.array(array.astype(mx.float32)).tolist()


def _block_class(plain: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass that runs fused if the cache and the mask allow."""

    def call(self: nn.Module, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if isinstance(cache, NativeLayerCache) and (
            mask is None or isinstance(mask, SlidingWindow)
        ):
            output: mx.array = self.fused(x, mask, cache)
        else:
            output = plain.__call__(self, x, mask, cache)
        return output

    return type(plain.__name__, (plain,), {"__call__": call})
