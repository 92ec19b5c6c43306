"""Replaces modules of an mlx-lm model by ones that call the native kernels.

Only modules of exactly the known classes are replaced, not of their subclasses.  Weights are packed
as they are stored, so a quantized model stays small; other modules become float32, as do all
activations.
"""

import mlx.core as mx
import mlx.nn as nn

from batching.backend.hooks.changes import Changes
from batching.backend.platforms.cpu.layers.activations import rebind_activations
from batching.backend.platforms.cpu.layers.experts import (
    SwitchLinear,
    is_switch_linear,
    replace_experts,
)
from batching.backend.platforms.cpu.layers.linear import (
    Embedding,
    Linear,
    Product,
    groups,
    is_embedding,
    is_linear,
)
from batching.backend.platforms.cpu.layers.norms import replace_norm
from batching.backend.platforms.cpu.layers.packing import (
    Packing,
    is_packable,
    parts_of,
    replace_class,
)
from batching.backend.platforms.cpu.layers.per_head import HeadLinear, is_head_linear, replace_heads
from batching.backend.platforms.cpu.layers.recurrent import rebind_recurrences, replace_convolution
from batching.backend.platforms.cpu.layers.rotary import StepAngles, replace_rope
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.weights.dequantize import dequantize


def replace_modules(
    model: nn.Module,
    native: Native,
    *,
    input_bits: int = 32,
    packing: Packing | None = None,
    changes: Changes,
) -> nn.Module:
    """Return the model with modules replaced by kernels and with float32 activations.

    input_bits: round the inputs of quantized weights to 8 or 16 bits, or to the fewest that the kernels
        support if these are more; 32 rounds nothing.
    packing: where weights come from, if not from the model's arrays.
    changes: gets the functions that are rebound while the model runs; its modules are replaced for good.
    """
    kernels = native.module
    packing = packing or Packing(kernels, max(input_bits, native.min_input_bits))
    parts = list(parts_of(model, _is_packed))
    for num_done, (path, part) in enumerate(parts, 1):
        packing.begin(path)
        _pack(path, part, packing)
        packing.end(num_done / len(parts))
    model.set_dtype(mx.float32)
    step_angles = StepAngles(kernels)
    for module in model.modules():
        replace_convolution(module, kernels)
        replace_norm(module, kernels)
        replace_rope(module, kernels, step_angles)
    rebind_activations(model, kernels, changes)
    rebind_recurrences(model, kernels, changes)
    mx.eval(model.parameters())
    return model


def _pack(path: str, part: nn.Module, packing: Packing) -> None:
    """Replace the modules of a part of the model that have packed weights."""
    # Quantized weights that the kernels do not know are exact in bfloat16.
    dequantize(part, keep=is_packable)
    packing.enter(path, part, _is_packed)
    for group in groups(part):
        product = Product(packing, group)
        for index, module in enumerate(group):
            replace_class(module, Linear, product=product, index=index)
    for module in part.modules():
        if is_embedding(module):
            replace_class(module, Embedding, product=Product(packing, [module]))
    replace_experts(part, packing)
    replace_heads(part, packing)


def min_input_bits(model: nn.Module) -> int:
    """Return the fewest bits that inputs are rounded to in a replaced model; 32 is no rounding."""
    modules = model.modules()
    products = [m.product.input_bits for m in modules if isinstance(m, Linear | Embedding)]
    experts = [m.input_bits for m in modules if isinstance(m, SwitchLinear | HeadLinear)]
    return min(products + experts, default=32)


def _is_packed(module: nn.Module) -> bool:
    is_matrix = is_linear(module) or is_embedding(module)
    return is_matrix or is_switch_linear(module) or is_head_linear(module)
