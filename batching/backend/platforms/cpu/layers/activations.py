"""Activations that models call as functions."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn import gelu_approx as mlx_gelu, silu as mlx_silu
from mlx_lm.models import activations
from mlx_lm.models.activations import precise_swiglu as mlx_precise_swiglu, swiglu as mlx_swiglu

from batching.backend.hooks.changes import Changes, plain, python_modules


def rebind_activations(model: nn.Module, kernels: Any, changes: Changes) -> None:
    """Rebind the functions that a model calls by name, in its Python modules or as names of mlx.nn."""

    def swiglu(gate: mx.array, x: mx.array) -> mx.array:
        """Return silu(gate) * x (SwiGLU, Shazeer 2020)."""
        is_float32 = gate.dtype == x.dtype == mx.float32
        result: mx.array = kernels.swiglu(gate, x) if is_float32 else mlx_swiglu(gate, x)
        return result

    def precise_swiglu(h: mx.array, gate: mx.array, x: mx.array) -> mx.array:
        """Return silu(gate) * x, computed in float32, in the type of h."""
        is_known = gate.shape == x.shape
        result: mx.array = kernels.swiglu(gate, x) if is_known else mlx_precise_swiglu(h, gate, x)
        return result.astype(h.dtype)

    def silu(x: mx.array) -> mx.array:
        result: mx.array = kernels.silu(x) if x.dtype == mx.float32 else mlx_silu(x)
        return result

    def gelu(x: mx.array) -> mx.array:
        result: mx.array = kernels.gelu(x) if x.dtype == mx.float32 else mlx_gelu(x)
        return result

    named: dict[str, tuple[Any, Callable[..., Any]]] = {
        "swiglu": (mlx_swiglu, swiglu),
        "precise_swiglu": (mlx_precise_swiglu, precise_swiglu),
    }
    for module in python_modules(model):
        # The functions there are compiled together with those of mlx.nn, for all models at once.
        if module is activations:
            continue
        for name, (known, function) in named.items():
            if plain(module, name) is known:
                changes.rebind(model, module, name, function)
        if plain(module, "nn") is nn:
            changes.rebind_within(model, module, "nn", silu=silu, gelu_approx=gelu)
