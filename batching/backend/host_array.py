"""Arrays of MLX as arrays of numpy."""

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt


def host_array(array: mx.array) -> npt.NDArray[Any]:
    """Return a copy of an array; bfloat16, which numpy has not, is to be cast before.

    It is evaluated first: an error on the way that numpy asks for the memory is lost, and the copy has what
    was in memory before.

    Raises:
        Exception: what computing or reading it raised.
    """
    mx.eval(array)
    return np.array(array)
