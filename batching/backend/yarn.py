"""YaRN (Peng et al. 2023) between frequencies as they are computed, as gpt-oss was trained."""

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import YarnRoPE


def leave_untruncated(model: nn.Module, config: dict[str, Any]) -> None:
    """Scale from where to where a config without truncation says; mlx-lm's goes to whole pairs."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if scaling.get("truncate") is not False:
        return
    base = scaling.get("rope_theta") or config["rope_theta"]
    for module in model.modules():
        if type(module) is YarnRoPE:
            module._freqs = _periods(module.dims, base, scaling)


def _periods(dims: int, base: float, scaling: dict[str, Any]) -> mx.array:
    """Return in how many tokens each pair turns by one radian: stretched, the more the slower."""
    plain = base ** (mx.arange(0, dims, 2, dtype=mx.float32) / dims)
    length = scaling.get("original_max_position_embeddings", 4096)

    def pair_of(rotations: float) -> float:
        """Return the pair that turns so often within the original context."""
        return dims * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    first = max(pair_of(scaling.get("beta_fast", 32)), 0)
    last = min(pair_of(scaling.get("beta_slow", 1)), dims - 1)
    share = mx.clip((mx.arange(dims // 2) - first) / (last - first), 0, 1)
    turns = (1 - share) / plain + share / (scaling["factor"] * plain)
    return mx.reciprocal(turns)
