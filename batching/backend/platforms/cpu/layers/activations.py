"""Activations that models call as functions."""

import ast
import inspect
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn import gelu_approx as mlx_gelu, silu as mlx_silu
from mlx_lm.models import activations
from mlx_lm.models.activations import precise_swiglu as mlx_precise_swiglu, swiglu as mlx_swiglu

from batching.backend.hooks.changes import Changes, original, python_modules


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
        if module is activations:
            continue
        for name, (known, function) in named.items():
            if original(module, name) is known:
                changes.rebind(model, module, name, function)
        if original(module, "nn") is nn and not _compiles_activations(module):
            changes.rebind_within(model, module, "nn", silu=silu, gelu_approx=gelu)


@cache
def _compiles_activations(module: ModuleType) -> bool:
    """Return whether a Python module has functions that `mx.compile` traces together with those of mlx.nn.

    A function is traced once for all models, so it must not meet one of a single model.
    """
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return True
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    compiled = [f for f in functions if any("compile" in ast.dump(d) for d in f.decorator_list)]
    used = (node for function in compiled for node in ast.walk(function))
    return any(isinstance(node, ast.Name) and node.id == "nn" for node in used)
