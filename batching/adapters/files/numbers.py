"""The numbers of tensors of safetensors files."""

from typing import Final

import numpy as np

DTYPE_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}


def decode(data: bytes, dtype: str) -> np.ndarray:
    """Return numbers as float32; `dtype` is one of DTYPE_BYTES."""
    if dtype == "F32":
        return np.frombuffer(data, "<f4")
    if dtype == "F16":
        return np.frombuffer(data, "<f2").astype(np.float32)
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)


def scaled(values: np.ndarray, scale: float) -> np.ndarray:
    """Return float32; what does not fit becomes infinite."""
    with np.errstate(all="ignore"):
        return values * np.float32(scale)
