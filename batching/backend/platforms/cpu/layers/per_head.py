"""Products with a matrix for each head (latent attention), by the native kernels."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear

from batching.backend.platforms.cpu.layers.packing import Packing, is_packable, replace_class


def replace_heads(model: nn.Module, packing: Packing) -> None:
    for module in model.modules():
        if is_head_linear(module):
            packed = packing.of(module)
            replace_class(
                module,
                HeadLinear,
                kernels=packing.kernels,
                group_size=module.group_size if "scales" in module else 0,
                input_bits=packing.input_bits if "scales" in module else 32,
                packed=packed,
                layer=packing.kernels.expert_layer(packed),
            )


def is_head_linear(module: nn.Module) -> bool:
    """Tell whether the kernels know the products of a module's heads."""
    is_quantized = type(module) is QuantizedMultiLinear
    return type(module) is MultiLinear or (is_quantized and is_packable(module))


class HeadLinear(nn.Module):
    """The product of each head with a matrix of its own."""

    kernels: Any
    group_size: int  # 0 if the weights are not quantized
    input_bits: int
    packed: Any
    layer: Any  # The same, as experts have it.

    def __call__(self, x: mx.array, transpose: bool = True) -> mx.array:
        """x `[B, num_heads or 1, L, inputs]`; not transposed, it has the outputs, and is multiplied back."""
        if not transpose:
            unit = mx.eye(self.packed.shape[1])[None, None]
            return x @ self(unit).swapaxes(-1, -2)
        num_heads: int = self.packed.num_matrices
        batch, _, length, size = x.shape
        heads = mx.arange(num_heads)[None, :, None]
        product: mx.array = self.kernels.switch_linear(
            mx.broadcast_to(x, (batch, num_heads, length, size)),
            mx.broadcast_to(heads, (batch, num_heads, length)),
            self.layer,
        )
        return product
