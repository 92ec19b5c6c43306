"""Selects the device that MLX computes on."""

from enum import StrEnum

import mlx.core as mx

from batching.config import DeviceName
from batching.errors import ModelLoadError


class Gpu(StrEnum):
    """A kind of GPU, by the name of MLX's backend for it."""

    METAL = "Metal"
    CUDA = "CUDA"


def select_device(name: DeviceName) -> Gpu | None:
    """Make a device MLX's default device; return its kind of GPU, None for the CPU.

    Raises:
        ModelLoadError: a GPU is required and MLX has none.
    """
    if name == "gpu" and not mx.is_available(mx.gpu):
        raise ModelLoadError(
            "no GPU that MLX can use is here: set MLX_SERVER_DEVICE=auto to compute on the CPU, or on "
            'Linux install MLX for CUDA, with DEVICE=cuda make serve or pip install ".[cuda]"'
        )
    if name != "auto":
        mx.set_default_device(mx.Device(mx.cpu if name == "cpu" else mx.gpu))
    return default_gpu()


def default_gpu() -> Gpu | None:
    """Return which kind of GPU the default device is; None for the CPU."""
    if mx.default_device() == mx.cpu:
        return None
    return Gpu.CUDA if mx.cuda.is_available() else Gpu.METAL
