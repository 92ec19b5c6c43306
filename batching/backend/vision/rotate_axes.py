"""The hook that lets the rotary embeddings of a model turn pairs by positions in several axes."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from batching.backend.frequencies import frequencies_of
from batching.backend.hooks.changes import Changes
from batching.backend.vision.axis_positions import AxisPositions


def hook_axes(model: nn.Module, changes: Changes) -> None:
    """Rotate by `AxisPositions`: once by each axis, and each pair is taken from the rotation by its own.

    Modules that compute angles themselves, as the CPU kernels' do, read the axes there.
    """
    for module in model.modules():
        if (frequencies := frequencies_of(module)) is not None:
            _hook(module, len(frequencies.radians), changes)


def _hook(module: nn.Module, num_pairs: int, changes: Changes) -> None:
    plain = type(module)
    is_traditional = bool(getattr(module, "traditional", False))

    def call(self: nn.Module, x: mx.array, offset: Any = 0, **options: Any) -> mx.array:
        if not isinstance(offset, AxisPositions):
            whole: mx.array = plain.__call__(self, x, offset, **options)
            return whole
        pairs = offset.pair_axes[:num_pairs]
        of_number = np.repeat(pairs, 2) if is_traditional else np.tile(pairs, 2)
        of_number = np.pad(of_number, (0, x.shape[-1] - len(of_number)))
        rotated: mx.array
        rotated, *others = (
            plain.__call__(self, x, mx.array(axis), **options) for axis in offset.axes
        )
        for axis, other in enumerate(others, 1):
            rotated = mx.where(mx.array(of_number == axis), other, rotated)
        return rotated

    changes.override_call(module, call)
