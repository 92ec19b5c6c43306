"""The hook for position ranges that a model's own code makes (Llama 4)."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from batching.backend.hooks.attention import attending_modules
from batching.backend.hooks.changes import Changes, original


def arange(*args: Any, **kwargs: Any) -> mx.array:
    """Return what `mx.arange` does, also from the positions `[T]` of rows to others: `[T, 1, 1]`.

    MLX raises for arrays.  A row is one token, so its range is its position.  A model adds an axis to a
    range `[L]` and multiplies queries `[B, num_heads, L, dim]` by it.
    """
    if len(args) == 2 and all(isinstance(each, mx.array) and each.ndim == 1 for each in args):
        positions: mx.array = args[0]
        return positions[:, None, None]
    return mx.arange(*args, **kwargs)


def hook_ranges(model: nn.Module, changes: Changes) -> None:
    """Rebind `mx.arange` in the model files that a model's classes come from: those that know attention."""
    for module in attending_modules(model):
        if original(module, "mx") is mx:
            changes.rebind_within(model, module, "mx", arange=arange)
