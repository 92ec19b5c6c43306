"""The hook for position ranges that a model's own code makes (Llama 4)."""

from types import ModuleType
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base

from batching.backend.hooks.attention import FUNCTION
from batching.backend.hooks.undo import python_modules


def arange(*args: Any, **kwargs: Any) -> mx.array:
    """Return what `mx.arange` does, also from the positions `[T]` of rows to others: `[T, 1, 1]`.

    MLX raises for arrays.  A row is one token, so its range is its position.  A model adds an axis to a
    range `[L]` and multiplies queries `[B, num_heads, L, dim]` by it.
    """
    if len(args) == 2 and all(isinstance(each, mx.array) and each.ndim == 1 for each in args):
        positions: mx.array = args[0]
        return positions[:, None, None]
    return mx.arange(*args, **kwargs)


def _mlx() -> ModuleType:
    module = ModuleType(mx.__name__, mx.__doc__)
    vars(module).update({**vars(mx), "arange": arange})
    return module


# All of MLX, but for ranges of rows.
MLX: Final = _mlx()


def hook_ranges(model: nn.Module) -> None:
    """Rebind MLX in the model files that a model's classes come from: those that know attention."""
    for module in python_modules(model):
        names = vars(module)
        if module is not base and FUNCTION in names and names.get("mx") is mx:
            names["mx"] = MLX
