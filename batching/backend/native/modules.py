"""Replaces modules of an mlx-lm model by ones that call the native kernels.

Only modules of exactly the known classes are replaced, not of their subclasses.  Weights are packed
as they are stored, so a quantized model stays small; other modules become float32, as do all
activations.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx.nn import gelu_approx as mlx_gelu, silu as mlx_silu
from mlx_lm.models import activations
from mlx_lm.models.activations import precise_swiglu as mlx_precise_swiglu, swiglu as mlx_swiglu

from batching.backend.cpu.modules import Rotation, swiglu as portable_swiglu
from batching.backend.dequantize import dequantize
from batching.backend.native.experts import SwitchLinear, is_switch_linear, replace_experts
from batching.backend.native.norms import replace_norm
from batching.backend.native.packing import Packing, is_packable, parts_of, replace_class
from batching.backend.native.per_head import HeadLinear, is_head_linear, replace_heads
from batching.backend.native.recurrent import rebind_recurrences, replace_convolution
from batching.backend.native.rotary import replace_rope
from batching.backend.native_loader import Native

# Children with these names have the same input and are computed together.
_SAME_INPUT: Final = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_proj", "kv_a_proj_with_mqa"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
_MAX_THIN: Final = 4


def replace_modules(
    model: nn.Module, native: Native, *, input_bits: int = 32, packing: Packing | None = None
) -> nn.Module:
    """Return the model with modules replaced by kernels and with float32 activations.

    input_bits: round the inputs of quantized weights to 8 or 16 bits, if the kernels support it; 32
        rounds nothing.
    packing: where weights come from, if not from the model's arrays.
    """
    kernels = native.module
    packing = packing or Packing(kernels, input_bits)
    for path, part in parts_of(model):
        packing.begin(path)
        _pack(path, part, packing)
        packing.end()
    model.set_dtype(mx.float32)
    rotation = Rotation()
    for module in model.modules():
        replace_convolution(module, kernels)
        replace_norm(module, kernels)
        replace_rope(module, kernels, rotation)
    _rebind_activations(model, kernels)
    rebind_recurrences(kernels)
    mx.eval(model.parameters())
    return model


def _pack(path: str, part: nn.Module, packing: Packing) -> None:
    """Replace the modules of a part of the model that have packed weights."""
    # What the kernels do not know is exact in bfloat16.
    dequantize(part, keep=is_packable)
    packing.enter(path, part, _is_packed)
    for group in _groups(part):
        product = Product(packing, group)
        for index, module in enumerate(group):
            replace_class(module, Linear, product=product, index=index)
    for module in part.modules():
        if _is_embedding(module):
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
    is_matrix = _is_linear(module) or _is_embedding(module)
    return is_matrix or is_switch_linear(module) or is_head_linear(module)


def _groups(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield all linear modules, those of one input together."""
    grouped: set[int] = set()
    for parent in model.modules():
        for names in _SAME_INPUT:
            group = [parent[name] for name in names if name in parent]
            kinds = {module.get("scales") is not None and module.group_size for module in group}
            if len(group) == len(names) and all(map(_is_linear, group)) and len(kinds) == 1:
                grouped |= {id(module) for module in group}
                yield group
    yield from ([m] for m in model.modules() if _is_linear(m) and id(m) not in grouped)


def _is_linear(module: Any) -> bool:
    if type(module) is nn.Linear:
        # Such a thin one is no work, and models read its weight (Gemma 3n, Kimi K3).
        return min(module.weight.shape) > _MAX_THIN
    return type(module) is nn.QuantizedLinear and is_packable(module)


def _is_embedding(module: nn.Module) -> bool:
    is_quantized = type(module) is nn.QuantizedEmbedding
    return type(module) is nn.Embedding or (is_quantized and is_packable(module))


class Product:
    """Products of several matrices with one input, all computed when the first is needed."""

    def __init__(self, packing: Packing, modules: Sequence[nn.Module]) -> None:
        self.kernels = packing.kernels
        # Either all are quantized or none is.
        self.input_bits = packing.input_bits if "scales" in modules[0] else 32
        self.packed = [packing.of(module) for module in modules]
        self.biases = [_bias(module) for module in modules]
        self._input: mx.array | None = None
        self._outputs: list[mx.array | None] = []

    def of(self, x: mx.array, index: int = 0) -> mx.array:
        if x is not self._input or self._outputs[index] is None:
            self._input = x
            self._outputs = self.kernels.linear(x, self.packed, self.biases)
        output, self._outputs[index] = self._outputs[index], None
        if not any(output is not None for output in self._outputs):
            self._input = None
        assert output is not None
        return output


def _bias(module: nn.Module) -> mx.array | None:
    return module.bias.astype(mx.float32) if "bias" in module else None


class Linear(nn.Module):
    product: Product
    index: int

    def __call__(self, x: mx.array) -> mx.array:
        return self.product.of(x, self.index)


class Embedding(nn.Module):
    product: Product

    def __call__(self, tokens: mx.array) -> mx.array:
        embedded: mx.array = self.product.kernels.embed(tokens, self.product.packed[0])
        return embedded

    def as_linear(self, x: mx.array) -> mx.array:
        return self.product.of(x)


def _rebind_activations(model: nn.Module, kernels: Any) -> None:
    """Rebind what the models call by name, in their own modules, or as a name of mlx.nn."""

    def swiglu(gate: mx.array, x: mx.array) -> mx.array:
        """Return silu(gate) * x (SwiGLU, Shazeer 2020), also in models without the kernels."""
        is_float32 = gate.dtype == x.dtype == mx.float32
        result: mx.array = kernels.swiglu(gate, x) if is_float32 else mlx_swiglu(gate, x)
        return result

    def precise_swiglu(h: mx.array, gate: mx.array, x: mx.array) -> mx.array:
        """Return silu(gate) * x, computed in float32, in the type of h."""
        is_known = gate.shape == x.shape
        result: mx.array = kernels.swiglu(gate, x) if is_known else mlx_precise_swiglu(h, gate, x)
        return result.astype(h.dtype)

    def silu(x: mx.array) -> mx.array:
        result: mx.array = kernels.silu(x) if x.dtype == mx.float32 else mlx_silu(x)
        return result

    for name in {type(module).__module__ for module in model.modules()} - {activations.__name__}:
        names = vars(sys.modules[name])
        if names.get("swiglu") in (mlx_swiglu, portable_swiglu):
            names["swiglu"] = swiglu
        if names.get("precise_swiglu") is mlx_precise_swiglu:
            names["precise_swiglu"] = precise_swiglu

    def gelu(x: mx.array) -> mx.array:
        result: mx.array = kernels.gelu(x) if x.dtype == mx.float32 else mlx_gelu(x)
        return result

    vars(nn)["silu"], vars(nn)["gelu_approx"] = silu, gelu
