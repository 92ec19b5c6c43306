"""Activations that models call as functions."""

import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn import gelu_approx as mlx_gelu, silu as mlx_silu
from mlx_lm.models import activations
from mlx_lm.models.activations import precise_swiglu as mlx_precise_swiglu, swiglu as mlx_swiglu


def rebind_activations(model: nn.Module, kernels: Any) -> None:
    """Rebind what the models call by name, in their own modules, or as a name of mlx.nn."""

    def swiglu(gate: mx.array, x: mx.array) -> mx.array:
        """Return silu(gate) * x (SwiGLU, Shazeer 2020), also in models without the kernels."""
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

    for name in {type(module).__module__ for module in model.modules()} - {activations.__name__}:
        names = vars(sys.modules[name])
        if names.get("swiglu") is mlx_swiglu:
            names["swiglu"] = swiglu
        if names.get("precise_swiglu") is mlx_precise_swiglu:
            names["precise_swiglu"] = precise_swiglu

    def gelu(x: mx.array) -> mx.array:
        result: mx.array = kernels.gelu(x) if x.dtype == mx.float32 else mlx_gelu(x)
        return result

    vars(nn)["silu"], vars(nn)["gelu_approx"] = silu, gelu
