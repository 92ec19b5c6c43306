"""Puts the kernels into a model."""

import mlx.nn as nn

from batching.backend.native.blocks import replace_blocks
from batching.backend.native.modules import replace_modules
from batching.backend.native_loader import Native


def use_kernels(
    model: nn.Module, native: Native, *, rounds: bool = False, input_bits: int = 32
) -> nn.Module:
    """Return the model with kernels in the place of modules, its activations float32.

    `rounds` and `input_bits` are those of `replace_modules`.
    """
    model = replace_modules(model, native, rounds=rounds, input_bits=input_bits)
    replace_blocks(model, native.module)
    return model
