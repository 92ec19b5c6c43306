"""A model's arrays by name."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten


def parameters(model: nn.Module) -> dict[str, mx.array]:
    flat: Any = tree_flatten(model.parameters())
    return dict(flat)
