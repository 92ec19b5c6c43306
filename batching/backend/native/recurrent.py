"""Recurrent layers of mlx-lm's models, computed by the native kernels."""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gated_delta
from mlx_lm.models.gated_delta import gated_delta_ops as mlx_gated_delta_ops


class Conv1d(nn.Conv1d):
    """A causal convolution of each channel by itself."""

    convolve: Callable[[mx.array], mx.array]

    def __call__(self, x: mx.array) -> mx.array:
        return self.convolve(x)


def replace_convolution(module: nn.Module, kernels: Any) -> None:
    """Let the kernels compute a convolution, if it is of the kind that they know."""
    if type(module) is not nn.Conv1d:
        return
    weight, bias = module.weight, module.get("bias")
    is_plain = (module.stride, module.padding, module.dilation) == (1, 0, 1)
    if is_plain and module.groups == len(weight) and weight.shape[2] == 1:
        module.__class__ = Conv1d
        module.convolve = partial(kernels.convolve, taps=weight[..., 0].T, bias=bias)


def rebind_recurrences(kernels: Any) -> None:
    """Rebind in mlx-lm what its models' functions compute a recurrence by, for all models."""

    def gated_delta_ops(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        beta: mx.array,
        state: mx.array | None = None,
        mask: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Compute the gated delta rule (Yang et al. 2024), also in models without the kernels."""
        arrays = (q, k, v, g, beta, *(() if state is None else (state,)))
        if mask is not None or any(a.dtype != mx.float32 for a in arrays):
            outputs: tuple[mx.array, mx.array] = mlx_gated_delta_ops(q, k, v, g, beta, state, mask)
        else:
            outputs = kernels.delta_rule(q, k, v, g, beta, state)
        return outputs

    gated_delta.gated_delta_ops = gated_delta_ops
