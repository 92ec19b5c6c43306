"""Positions of rows in several axes, by which a rotary embedding turns different pairs (M-RoPE)."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Axes = npt.NDArray[np.int32]


class AxisPositions(mx.array):
    """The positions of a step's rows in time, height and width (M-RoPE, Qwen2-VL, Wang et al. 2024).

    As an array it has those of the first axis, which is all that a model's code reads itself.

    axes: `[3, T]`.
    pair_axes: which of the axes turns each pair, `[num_pairs]`.
    """

    axes: Axes
    pair_axes: npt.NDArray[np.int64]

    @classmethod
    def of(cls, axes: Axes, pair_axes: npt.NDArray[np.int64]) -> mx.array:
        """Return positions of these axes; plain ones if they are equal, as those of text are."""
        if (axes == axes[0]).all():
            return mx.array(axes[0])
        positions = cls(mx.array(axes[0]))
        positions.axes, positions.pair_axes = axes, pair_axes
        return positions

    @property
    def by_pair(self) -> Axes:
        """The position of each row for each pair, `[T, num_pairs]`."""
        return self.axes[self.pair_axes].T


def pair_axes_of(section: Sequence[int], *, is_interleaved: bool) -> npt.NDArray[np.int64]:
    """Return which axis turns each pair, from a config's `mrope_section`: the number of pairs of each axis."""
    if not is_interleaved:
        return np.repeat(np.arange(len(section)), section)
    axes = np.zeros(sum(section), np.int64)
    for axis, num_pairs in list(enumerate(section))[1:]:
        axes[axis : len(section) * num_pairs : len(section)] = axis
    return axes
