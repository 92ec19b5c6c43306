"""What a model computes of some tokens, and how far that is off."""

from typing import Final

import mlx.core as mx
import mlx.nn as nn

TOKENS: Final = mx.array([[3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26]])


def logits_of(model: nn.Module) -> mx.array:
    logits: mx.array = model(TOKENS)
    mx.eval(logits)
    return logits


def error(logits: mx.array, exact: mx.array) -> float:
    """Return the root mean square of the differences, of that of the exact logits."""
    return float(mx.sqrt(mx.square(logits - exact).mean() / mx.square(exact).mean()))
