"""The hook for attention: replaces the function that mlx-lm's models call."""

import sys
from types import ModuleType
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base

from batching.backend.hooks.changes import Changes, original, python_modules
from batching.backend.paged.kv_cache import LayerCache, SharedKeys
from batching.backend.paged.latent_cache import Latents, PendingScores

FUNCTION: Final = "scaled_dot_product_attention"
_BASE_OF_MLX_VLM: Final = "mlx_vlm.models.base"


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


def hook_attention(model: nn.Module, changes: Changes) -> None:
    """Rebind the attention function in every Python module that the model's classes come from.

    Models import the function by name, so each of these names is rebound.
    """
    for module in attending_modules(model):
        changes.rebind(model, module, FUNCTION, attention)


def attending_modules(model: nn.Module) -> list[ModuleType]:
    """Return the Python modules of a model's classes that import the attention function of mlx-lm, or mlx-vlm's."""
    own = [base, *(sys.modules[name] for name in (_BASE_OF_MLX_VLM,) if name in sys.modules)]
    functions = [vars(module)[FUNCTION] for module in own]
    return [m for m in python_modules(model) if m not in own and original(m, FUNCTION) in functions]
