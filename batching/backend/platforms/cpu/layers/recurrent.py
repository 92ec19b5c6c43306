"""Recurrent layers of mlx-lm's models, computed by the native kernels."""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gated_delta, ssm
from mlx_lm.models.gated_delta import gated_delta_ops as mlx_gated_delta_ops
from mlx_lm.models.ssm import compute_dt, ssm_attn as mlx_ssm_attn

from batching.backend.hooks.changes import Changes


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
        module.convolve = partial(kernels.convolve, taps=mx.contiguous(weight[..., 0].T), bias=bias)


def rebind_recurrences(model: nn.Module, kernels: Any, changes: Changes) -> None:
    """Rebind the functions in mlx-lm that compute a model's recurrences."""
    delta_rule, attend = partial(_gated_delta_ops, kernels), partial(_ssm_attn, kernels)
    changes.rebind(model, gated_delta, "gated_delta_ops", delta_rule)
    changes.rebind(model, ssm, "ssm_attn", attend)


def _gated_delta_ops(
    kernels: Any,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Compute the gated delta rule (Yang et al. 2024)."""
    arrays = (q, k, v, g, beta, *(() if state is None else (state,)))
    if mask is not None or any(a.dtype != mx.float32 for a in arrays):
        outputs: tuple[mx.array, mx.array] = mlx_gated_delta_ops(q, k, v, g, beta, state, mask)
    else:
        outputs = kernels.delta_rule(q, k, v, g, beta, state)
    return outputs


def _ssm_attn(
    kernels: Any,
    x: mx.array,
    a_log: mx.array,
    b: mx.array,
    c: mx.array,
    d: mx.array,
    dt: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    time_step_limit: tuple[float, float] = (0.001, 100.0),
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
    step: int = 256,
) -> tuple[mx.array, mx.array]:
    """Compute Mamba 2's recurrence (Dao and Gu 2024)."""
    arrays = (x, b, c, *(() if state is None else (state,)))
    is_padded = mask is not None or lengths is not None
    if is_padded or any(a.dtype != mx.float32 for a in arrays):
        outputs: tuple[mx.array, mx.array] = mlx_ssm_attn(
            x, a_log, b, c, d, dt, dt_bias, state, time_step_limit, mask, lengths, step
        )
        return outputs
    dt = compute_dt(dt, dt_bias, time_step_limit)
    decay = mx.exp(-mx.exp(a_log) * dt)
    y, new_state = kernels.delta_rule(c, b, x, decay, dt, state, is_additive=True)
    return y + x * d[:, None], new_state
