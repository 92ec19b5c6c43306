"""Quantized products of all rows of a step at once, for CUDA.

There MLX treats the rows of a step, `[T, 1, num_inputs]`, as T products of one row each and reads the
weights for every one of them.  With two dimensions it is a single product.  MLX joins unquantized
products by itself, and on Metal quantized ones as well.
"""

from collections.abc import Callable
from typing import Final

import mlx.core as mx
import mlx.nn as nn

from batching.backend.hooks.changes import Changes


def flatten_rows(model: nn.Module, changes: Changes) -> None:
    """Let a quantized matrix multiply the rows of a step in one product."""
    for module in model.modules():
        if (flat := _FLAT.get(type(module))) is not None:
            changes.set_attribute(module, "__class__", flat)


class QuantizedLinear(nn.QuantizedLinear):
    def __call__(self, x: mx.array) -> mx.array:
        return _by_row(super().__call__, x)


class QuantizedAllToShardedLinear(nn.QuantizedAllToShardedLinear):
    def __call__(self, x: mx.array) -> mx.array:
        return _by_row(super().__call__, x)


class QuantizedShardedToAllLinear(nn.QuantizedShardedToAllLinear):
    def __call__(self, x: mx.array) -> mx.array:
        return _by_row(super().__call__, x)


class QuantizedEmbedding(nn.QuantizedEmbedding):
    def as_linear(self, x: mx.array) -> mx.array:
        return _by_row(super().as_linear, x)


def _by_row(product: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
    if x.ndim != 3 or x.shape[1] != 1 or len(x) == 1:
        return product(x)
    return product(x.squeeze(1))[:, None]


_FLAT: Final[dict[type, type]] = {
    nn.QuantizedLinear: QuantizedLinear,
    nn.QuantizedAllToShardedLinear: QuantizedAllToShardedLinear,
    nn.QuantizedShardedToAllLinear: QuantizedShardedToAllLinear,
    nn.QuantizedEmbedding: QuantizedEmbedding,
}
