"""Products of matrices with rows, and rows of embeddings."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

from batching.backend.platforms.cpu.layers.packing import Packing, input_group, is_packable

# Children with these names have the same input and are computed together.
_SAME_INPUT: Final = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_proj", "kv_a_proj_with_mqa"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
_MAX_THIN: Final = 4


def groups(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield all linear modules, those of one input together."""
    grouped: set[int] = set()
    for parent in model.modules():
        for names in _SAME_INPUT:
            group = [parent[name] for name in names if name in parent]
            kinds = {input_group(module) for module in group}
            if len(group) == len(names) and all(map(is_linear, group)) and len(kinds) == 1:
                grouped |= {id(module) for module in group}
                yield group
    yield from ([m] for m in model.modules() if is_linear(m) and id(m) not in grouped)


def is_linear(module: Any) -> bool:
    if type(module) is nn.Linear:
        # Such a thin one is no work, and models read its weight (Gemma 3n, Kimi K3).
        return min(module.weight.shape) > _MAX_THIN
    return type(module) is nn.QuantizedLinear and is_packable(module)


def is_embedding(module: nn.Module) -> bool:
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
