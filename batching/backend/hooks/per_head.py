"""Products with a matrix for each head (latent attention), of all rows of a step at once."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear

from batching.backend.hooks.changes import Changes


def join_rows(model: nn.Module, changes: Changes) -> None:
    """Let a head's matrix multiply the rows of a step in one product.

    Rows of length 1, `[T, num_heads, 1, dim]`, are a product each otherwise, which reads all matrices again.
    """
    for module in model.modules():
        if type(module) in (MultiLinear, QuantizedMultiLinear):
            _join(module, changes)


def _join(module: nn.Module, changes: Changes) -> None:
    plain = type(module)

    def call(self: nn.Module, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        if x.ndim == 4 and x.shape[0] > 1 and x.shape[2] == 1:
            return plain.__call__(self, x.swapaxes(0, 2), *args, **kwargs).swapaxes(0, 2)
        return plain.__call__(self, x, *args, **kwargs)

    changes.override_call(module, call)
