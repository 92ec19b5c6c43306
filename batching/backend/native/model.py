"""Replaces modules of a model by the native kernels."""

import mlx.nn as nn

from batching.backend.native.blocks import replace_blocks
from batching.backend.native.modules import replace_modules
from batching.backend.native_loader import Native


def use_kernels(
    model: nn.Module, native: Native, *, rounds_to_fp16: bool = False, input_bits: int = 32
) -> nn.Module:
    """Return the model with modules replaced by kernels and with float32 activations.

    `rounds_to_fp16` and `input_bits` are those of `replace_modules`.
    """
    model = replace_modules(model, native, rounds_to_fp16=rounds_to_fp16, input_bits=input_bits)
    replace_blocks(model, native.module)
    return model
