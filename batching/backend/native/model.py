"""Puts the kernels into a model."""

import mlx.nn as nn

from batching.backend.native.blocks import replace_blocks
from batching.backend.native.extension import Native
from batching.backend.native.modules import replace_modules


def use_kernels(
    model: nn.Module, native: Native, *, rounds: bool = False, is_fast: bool = False
) -> nn.Module:
    """Return the model with kernels in the place of modules, its activations float32.

    rounds: quantized weights are those that dequantizing in float16 gives.
    is_fast: what is multiplied with quantized weights is rounded to 16 bits before.
    """
    model = replace_modules(model, native, rounds=rounds, is_fast=is_fast and native.has_int16)
    replace_blocks(model, native.module)
    return model
