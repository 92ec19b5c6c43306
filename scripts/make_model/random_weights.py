"""Random weights under which every part of a model matters to its logits.

mlx-lm initialises gates, convolutions, biases and sinks to constants, many of them to zero; then
a wrong state would leave the logits as they are.
"""

import math
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

# Decays by name, such that a recurrence keeps about half of its state over 10 to 100 tokens.
_DECAYS: Final[dict[str, tuple[float, float]]] = {
    "A_log": (-2.5, -1.0),
    "dt_bias": (-1.5, 0.5),
    "recurrent_param": (-5.0, -3.5),
}
# Weights packed in 2 bits: 0 to 3 of these scales above this bias.
_PACKED: Final = {"scales": 0.04, "biases": -0.06}
# A LoRA whose sigmoid is a rate of decay.
_DECAY_BIAS: Final = "w_lora.lora.2.bias"


def randomise(model: nn.Module, seed: int) -> None:
    """Give each parameter random values in float32."""
    parameters: list[tuple[str, Any]] = [*tree_flatten(model.parameters())]
    keys = mx.random.split(mx.random.key(seed), len(parameters))
    model.update(
        tree_unflatten(
            [
                (path, _random(path, value, key))
                for (path, value), key in zip(parameters, keys, strict=True)
            ]
        )
    )
    mx.eval(model.parameters())


def _random(path: str, value: mx.array, key: mx.array) -> mx.array:
    """Keep a vector near its first value, a scale or a shift, and replace a matrix."""
    name = path.rpartition(".")[2]
    if not mx.issubdtype(value.dtype, mx.floating):
        return mx.random.randint(0, 2**31 - 1, value.shape, value.dtype, key=key)
    if name in _DECAYS:
        return mx.random.uniform(*_DECAYS[name], value.shape, key=key)
    if path.endswith(_DECAY_BIAS):
        return mx.random.uniform(-5.0, -3.0, value.shape, key=key)
    noise = mx.random.normal(value.shape, key=key)
    if name in _PACKED:
        return _PACKED[name] * (1 + 0.1 * noise)
    if name == "signs":
        return mx.sign(noise)
    if "conv" in path and value.ndim > 1:
        return noise / math.sqrt(value.size / value.shape[0])
    if path.endswith("k_norm.weight"):
        # Some models do not scale their scores, and sharp ones magnify rounding.
        value = value * 0.5
    if value.size == max(value.shape, default=1):
        return value.astype(mx.float32) + 0.2 * noise
    return noise / math.sqrt(value.shape[-1])
