"""The hook for attention: replaces the function that mlx-lm's models call."""

from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base

from batching.backend.hooks.undo import python_modules
from batching.backend.paged.kv_cache import LayerCache, SharedKeys
from batching.backend.paged.latent_cache import Latents, PendingScores

FUNCTION: Final = "scaled_dot_product_attention"


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,  # whatever cache the caller uses
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend over the paged pool if keys or cache belong to it, otherwise as mlx-lm does."""
    if isinstance(mask, PendingScores) and isinstance(keys, Latents):
        return keys.layer.attend_latents(queries, mask, scale)
    layer = keys.layer if isinstance(keys, SharedKeys) else cache
    if isinstance(layer, LayerCache):
        return layer.attend(queries, scale=scale, mask=mask, sinks=sinks)
    return base.scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
    )


def hook_attention(model: nn.Module) -> None:
    """Replace the attention function in every Python module that the model's classes come from.

    Models import the function by name, so each of these names is rebound.  Models that run on mlx-lm's
    own caches are not affected.
    """
    for module in python_modules(model):
        if module is not base and vars(module).get(FUNCTION) is base.scaled_dot_product_attention:
            setattr(module, FUNCTION, attention)
