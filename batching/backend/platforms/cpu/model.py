"""Replaces modules of a model by the native kernels."""

import logging

import mlx.nn as nn

from batching.backend.exceptions import one_line
from batching.backend.hooks.changes import Changes
from batching.backend.platforms.cpu.fused.blocks import replace_blocks
from batching.backend.platforms.cpu.layers.one_input import of_one_input
from batching.backend.platforms.cpu.layers.packing import Packing
from batching.backend.platforms.cpu.layers.replace import replace_modules
from batching.backend.platforms.cpu.layers.scaling import find_shifts
from batching.backend.platforms.cpu.native_loader import Native

logger = logging.getLogger(__name__)


def use_kernels(
    model: nn.Module,
    native: Native,
    *,
    input_bits: int = 32,
    packing: Packing | None = None,
    changes: Changes,
) -> nn.Module:
    """Return the model with modules replaced by kernels and with float32 activations.

    `input_bits`, `packing` and `changes` are those of `replace_modules`.
    """
    packing = packing or Packing(native.module, max(input_bits, native.min_input_bits))
    model = replace_modules(model, native, packing=packing, changes=changes)
    packing.slices.pause()
    if packing.finds_inputs:
        packing.of_one_input = of_one_input(model, packing.packed)
    if packing.finds_shifts:
        try:
            packing.shifts = find_shifts(model, packing.packed, packing.slices)
        except Exception as error:
            # The code of a model can raise anything.
            logger.warning("inputs are not scaled by channel: %s", one_line(error))
    packing.slices.pause()
    replace_blocks(model, native, changes)
    return model
