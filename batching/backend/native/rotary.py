"""Rotary embeddings (Su et al. 2021) with the angles of a step computed once."""

from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.rope_utils import Llama3RoPE, ProportionalRoPE, SuScaledRoPE, YarnRoPE

from batching.backend.cpu.modules import (
    Frequencies,
    Rotation,
    plain_frequencies,
    tabulated_frequencies,
)

# What scales the rotated numbers of those with a table of frequencies.
_FACTORS: Final = {
    Llama3RoPE: None,
    ProportionalRoPE: None,
    SuScaledRoPE: "_scale",
    YarnRoPE: "mscale",
}
_POSITIONS: Final = (0, 1, 7, 40)
_TOLERANCE: Final = 1e-4


class RoPE(nn.Module):
    """Comes before the plain class, that computes all but steps."""

    kernels: Any
    rotation: Rotation
    frequencies: Frequencies

    def __call__(self, x: mx.array, offset: Any = 0, **options: Any) -> mx.array:
        is_step = isinstance(offset, mx.array) and offset.ndim == 1 and x.shape[-2] == 1
        if not is_step or options:
            plain: mx.array = super().__call__(x, offset, **options)
            return plain
        rotated: mx.array = self.kernels.rope(x, *self.angles(offset), self.is_traditional)
        return rotated

    @property
    def is_traditional(self) -> bool:
        return bool(getattr(self, "traditional", False))

    def angles(self, positions: mx.array) -> tuple[mx.array, mx.array]:
        """Return cosines and sines, `[T, dims / 2]`."""
        return self.rotation.angles(positions, self.frequencies).by_row


def replace_rope(module: nn.Module, kernels: Any, rotation: Rotation) -> None:
    """Let a rotary embedding of a known class rotate by angles, if it then rotates as before."""
    frequencies = _frequencies(module)
    if frequencies is None:
        return
    plain = type(module)
    module.__class__ = type(plain.__name__, (RoPE, plain), {})
    module.kernels, module.rotation, module.frequencies = kernels, rotation, frequencies
    if not _rotates_alike(module, len(frequencies.radians)):
        module.__class__ = plain


def _frequencies(module: nn.Module) -> Frequencies | None:
    if type(module) is nn.RoPE:
        return plain_frequencies(module.dims, module.base, module.scale)
    if type(module) not in _FACTORS:
        return None
    name = _FACTORS[type(module)]
    factor = getattr(module, name) if name else 1.0
    return tabulated_frequencies(tuple(module._freqs.tolist()), factor)


def _rotates_alike(rope: nn.Module, num_pairs: int) -> bool:
    rng = np.random.default_rng(0)
    x = mx.array(rng.standard_normal((len(_POSITIONS), 1, 1, 2 * num_pairs)), mx.float32)
    plain = [rope(row[None], offset) for row, offset in zip(x, _POSITIONS, strict=True)]
    rotated = rope(x, mx.array(_POSITIONS))
    return float(mx.abs(rotated - mx.concatenate(plain)).max()) < _TOLERANCE
