"""The numbers of an adapter for one layer."""

from typing import NamedTuple

import numpy as np


class LowRank(NamedTuple):
    """What an adapter adds to a layer: x A B, the scale included in B.

    a: float32 `[inputs, rank]`.
    b: float32 `[rank, outputs]`.
    dtype: what the file has them in, as safetensors names it: F32, F16 or BF16.
    """

    a: np.ndarray
    b: np.ndarray
    dtype: str = "F32"
