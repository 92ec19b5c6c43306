"""Replaces modules of a model by the native kernels."""

import mlx.nn as nn

from batching.backend.native.fused.blocks import replace_blocks
from batching.backend.native.fused.stack import stack_layers
from batching.backend.native.layers.packing import Packing
from batching.backend.native.layers.replace import replace_modules
from batching.backend.native_loader import Native


def use_kernels(
    model: nn.Module, native: Native, *, input_bits: int = 32, packing: Packing | None = None
) -> nn.Module:
    """Return the model with modules replaced by kernels and with float32 activations.

    `input_bits` and `packing` are those of `replace_modules`.
    """
    model = replace_modules(model, native, input_bits=input_bits, packing=packing)
    replace_blocks(model, native)
    stack_layers(model, native.module)
    return model
