"""Norms and rotations of queries and keys that can be left to the kernel that writes.

What a norm and a rotary embedding return knows what it was made from.  It is an array like any other, and
computed if anything reads it; if queries and keys reach the pool as they are, the kernel takes what they were
made from, and MLX computes none of it.
"""

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from batching.backend.frequencies import Frequencies, frequencies_of
from batching.backend.hooks.changes import Changes
from batching.backend.platforms.cpu.layers.norms import rms_norm_offset
from batching.backend.platforms.gpu.pool_kernels import HeadNorms, Rotation
from batching.backend.platforms.gpu.step_rows import padded


class _Norm(NamedTuple):
    weight: mx.array
    eps: float


class Normed(mx.array):
    """Heads of rows after a norm; `raw` are those before."""

    raw: mx.array
    norm: _Norm

    @classmethod
    def of(cls, normed: mx.array, raw: mx.array, norm: _Norm) -> "Normed":
        made = cls(normed)
        made.raw, made.norm = raw, norm
        return made

    def transpose(self, *axes: Any) -> "Normed":  # type: ignore[override]
        return Normed.of(super().transpose(*axes), self.raw.transpose(*axes), self.norm)

    def swapaxes(self, *axes: int) -> "Normed":  # type: ignore[override]
        return Normed.of(super().swapaxes(*axes), self.raw.swapaxes(*axes), self.norm)


class Rotated(mx.array):
    """Heads of rows after a rotation, `[T, num_heads, 1, key_dim]`; `before` are those before it."""

    before: mx.array
    rotation: Rotation
    positions: mx.array


class Unrotated(NamedTuple):
    """The queries and keys that rotated ones were made from, `[T, num_heads, 1, key_dim]`."""

    queries: mx.array
    keys: mx.array
    rotation: Rotation
    norms: HeadNorms | None


def rotated_alike(queries: mx.array, keys: mx.array, positions: mx.array) -> Unrotated | None:
    """Return what queries and keys of a step were made from, if in one way, at its positions."""
    if not (isinstance(queries, Rotated) and isinstance(keys, Rotated)):
        return None
    if not (queries.positions is keys.positions is positions):
        return None
    if queries.rotation is not keys.rotation:
        return None
    made = queries.before, keys.before
    q, k = (each if isinstance(each, Normed) else None for each in made)
    if q is None or k is None or q.norm.eps != k.norm.eps:
        return Unrotated(*made, queries.rotation, None)
    norms = HeadNorms(q.norm.weight, k.norm.weight, q.norm.eps)
    return Unrotated(q.raw, k.raw, queries.rotation, norms)


def remember_rotations(model: nn.Module, changes: Changes) -> None:
    """Let the norms of heads and the rotary embeddings of a model tell what they return is made from."""
    for module in model.modules():
        if (frequencies := frequencies_of(module)) is not None:
            _remember_rotation(module, frequencies, changes)
        elif (offset := rms_norm_offset(module)) is not None:
            _remember_norm(module, offset, changes)


def _remember_rotation(module: nn.Module, frequencies: Frequencies, changes: Changes) -> None:
    plain = type(module)
    rotation = Rotation(
        mx.array(padded(frequencies.radians.astype(np.float32), 0)),
        2 * len(frequencies.radians),
        frequencies.factor,
        bool(getattr(module, "traditional", False)),
    )

    def call(self: Any, x: mx.array, offset: Any = 0, **options: Any) -> mx.array:
        rotated: mx.array = plain.__call__(self, x, offset, **options)
        is_step = isinstance(offset, mx.array) and offset.ndim == 1
        if options or not is_step or x.ndim != 4 or x.shape[2] != 1:
            return rotated
        made = Rotated(rotated)
        made.before, made.rotation, made.positions = x, rotation, offset
        return made

    changes.override_call(module, call)


def _remember_norm(module: nn.Module, offset: float, changes: Changes) -> None:
    plain = type(module)
    norm = _Norm(module.weight + offset if offset else module.weight, module.eps)

    def call(self: Any, x: mx.array) -> mx.array:
        normed: mx.array = plain.__call__(self, x)
        # Only heads have 4 axes; other inputs are `[T, 1, hidden_size]`.
        return normed if x.ndim != 4 else Normed.of(normed, x, norm)

    changes.override_call(module, call)
