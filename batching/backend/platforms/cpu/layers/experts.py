"""Mixtures of experts, whose rows the native kernels group by expert."""

from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.switch_layers import (
    QuantizedSwitchLinear,
    SwiGLU,
    SwitchGLU,
    SwitchLinear as MlxSwitchLinear,
)

from batching.backend.platforms.cpu.layers.packing import (
    Packing,
    input_group,
    is_packable,
    replace_class,
)

_PRODUCTS: Final = ("gate_proj", "up_proj", "down_proj")


def replace_experts(model: nn.Module, packing: Packing) -> None:
    """Replace the products of experts, and where it is known what is between them, all at once."""
    for module in model.modules():
        if is_switch_linear(module):
            bias = module.bias.astype(mx.float32) if "bias" in module else None
            is_quantized = "scales" in module
            replace_class(
                module,
                SwitchLinear,
                kernels=packing.kernels,
                input_group=input_group(module),
                input_bits=packing.input_bits if is_quantized else 32,
                layer=packing.kernels.expert_layer(packing.of(module), bias),
            )
    for module in model.modules():
        if type(module) is SwitchGLU and _is_known(module):
            module.__class__ = Experts
            module.kernels = packing.kernels
            layers = [module[name].layer for name in _PRODUCTS]
            module.gated = packing.kernels.gated_experts(*layers, *_clip(module.activation))


def is_switch_linear(module: Any) -> bool:
    """Tell whether the kernels know the products of a module's experts."""
    is_quantized = type(module) is QuantizedSwitchLinear
    return type(module) is MlxSwitchLinear or (is_quantized and is_packable(module))


def _is_known(module: nn.Module) -> bool:
    if not all(type(module[name]) is SwitchLinear for name in _PRODUCTS):
        return False
    # Their input is packed once.
    are_alike = module.gate_proj.input_group == module.up_proj.input_group
    return are_alike and type(module.activation) in (SwiGLU, SwigluOAI)


def _clip(activation: nn.Module) -> tuple[float, float]:
    """Return what limits an activation, (0, 0) if nothing does."""
    is_clipped = type(activation) is SwigluOAI
    return (activation._alpha, activation._limit) if is_clipped else (0.0, 0.0)


class SwitchLinear(nn.Module):
    """The product of each row with the matrix of an expert."""

    kernels: Any
    input_group: int
    input_bits: int
    layer: Any

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """x `[..., rows, inputs]`; its other axes are broadcast with the indices."""
        num_rows, size = x.shape[-2:]
        # The kernel takes equally many indices for each row; the calls of experts are in this form already.
        if num_rows > 1 or x.shape[:-2] != (*indices.shape[:-1], 1):
            shape = np.broadcast_shapes(x.shape[:-2], indices.shape)
            x = mx.broadcast_to(x, (*shape, num_rows, size))
            indices = mx.broadcast_to(indices, shape)
        each = mx.broadcast_to(indices[..., None], (*indices.shape, num_rows))
        product: mx.array = self.kernels.switch_linear(x, each, self.layer)
        return product


class Experts(SwitchGLU):
    """Gate, up, what is between them, and down, as one operation."""

    kernels: Any
    gated: Any

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        outputs: mx.array = self.kernels.experts(x, indices, self.gated)
        return outputs
