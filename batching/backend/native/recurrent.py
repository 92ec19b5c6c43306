"""Recurrences of mlx-lm's models, computed by the native kernels."""

from typing import Any

import mlx.core as mx
from mlx_lm.models import gated_delta
from mlx_lm.models.gated_delta import gated_delta_ops as mlx_gated_delta_ops


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
