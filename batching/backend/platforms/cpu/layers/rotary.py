"""Rotary embeddings (Su et al. 2021) with the angles of a step computed once."""

from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from batching.backend.frequencies import Frequencies, frequencies_of
from batching.backend.vision.axis_positions import AxisPositions

_POSITIONS: Final = (0, 1, 7, 40)
_TOLERANCE: Final = 1e-4


class StepAngles:
    """The angles of the latest positions.

    All layers of a step use one and the same array of positions.
    """

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self._positions: mx.array | None = None
        self._angles: dict[Frequencies, tuple[mx.array, mx.array]] = {}
        self._native: dict[Frequencies, Any] = {}

    def of(self, positions: mx.array, frequencies: Frequencies) -> tuple[mx.array, mx.array]:
        """Return cosines and sines, `[T, dims / 2]`."""
        if positions is not self._positions:
            self._positions, self._angles = positions, {}
        if frequencies not in self._angles:
            self._angles[frequencies] = (
                _by_pair(positions, frequencies)
                if isinstance(positions, AxisPositions)
                else self._kernels.angles(positions, self._of_kernels(frequencies))
            )
        return self._angles[frequencies]

    def _of_kernels(self, frequencies: Frequencies) -> Any:
        if frequencies not in self._native:
            radians = frequencies.radians.tolist()
            self._native[frequencies] = self._kernels.Frequencies(radians, frequencies.factor)
        return self._native[frequencies]


def _by_pair(positions: AxisPositions, frequencies: Frequencies) -> tuple[mx.array, mx.array]:
    """Return the angles of positions that are other ones for each pair."""
    radians = positions.by_pair[:, : len(frequencies.radians)] * frequencies.radians
    cosines, sines = (frequencies.factor * of(radians) for of in (np.cos, np.sin))
    return mx.array(cosines.astype(np.float32)), mx.array(sines.astype(np.float32))


class RoPE(nn.Module):
    """Comes before the plain class, that computes all but steps."""

    kernels: Any
    step_angles: StepAngles
    frequencies: Frequencies
    is_traditional: bool

    def __call__(self, x: mx.array, offset: Any = 0, **options: Any) -> mx.array:
        is_step = isinstance(offset, mx.array) and offset.ndim == 1 and x.shape[-2] == 1
        if not is_step or options:
            plain: mx.array = super().__call__(x, offset, **options)
            return plain
        rotated: mx.array = self.kernels.rope(x, *self.angles(offset), self.is_traditional)
        return rotated

    def angles(self, positions: mx.array) -> tuple[mx.array, mx.array]:
        """Return cosines and sines, `[T, dims / 2]`."""
        return self.step_angles.of(positions, self.frequencies)


def replace_rope(module: nn.Module, kernels: Any, step_angles: StepAngles) -> None:
    """Let a rotary embedding rotate by angles, if it then rotates as before."""
    frequencies = frequencies_of(module)
    if frequencies is None:
        return
    plain = type(module)
    module.__class__ = type(plain.__name__, (RoPE, plain), {})
    module.kernels, module.step_angles = kernels, step_angles
    module.frequencies = frequencies
    for is_traditional in _may_be_traditional(module):
        module.is_traditional = is_traditional
        if _rotates_alike(module, len(frequencies.radians)):
            return
    module.__class__ = plain


def _may_be_traditional(module: nn.Module) -> tuple[bool, ...]:
    return (bool(module.traditional),) if hasattr(module, "traditional") else (False, True)


def _rotates_alike(rope: nn.Module, num_pairs: int) -> bool:
    """Tell whether steps are rotated like single rows; a class of any other kind may raise."""
    rng = np.random.default_rng(0)
    x = mx.array(rng.standard_normal((len(_POSITIONS), 1, 1, 2 * num_pairs)), mx.float32)
    try:
        plain = [rope(row[None], offset) for row, offset in zip(x, _POSITIONS, strict=True)]
        rotated = rope(x, mx.array(_POSITIONS))
    except Exception:
        return False
    return float(mx.abs(rotated - mx.concatenate(plain)).max()) < _TOLERANCE
