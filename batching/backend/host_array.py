"""Converts MLX arrays to numpy arrays."""

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt


def host_array(array: mx.array) -> npt.NDArray[Any]:
    """Return a copy of an array; cast bfloat16 before, since numpy does not have it.

    The array is evaluated first: if numpy evaluated it, an error would be lost and the copy would contain
    whatever was in memory.

    Raises:
        Exception: what computing or reading the array raised.
    """
    mx.eval(array)
    return np.array(array)
