"""What MLX is and has on this machine, for who asks without a model."""

from importlib.metadata import version
from typing import Final

import mlx.core as mx

from batching.backend import BLAS
from batching.backend.builder.platforms import choose_platform
from batching.backend.devices import Gpu, default_gpu
from batching.backend.memory.device import device_memory, free_memory
from batching.backend.platforms.cpu.platform import CPUPlatform
from batching.config import EngineConfig
from batching.host.backend_report import BackendReport

_WIRED: Final = "max_recommended_working_set_size"


def report(config: EngineConfig) -> BackendReport:
    """Ask MLX, and load the native kernels.

    Raises:
        ModelLoadError: what is required is not here.
    """
    platform = choose_platform(config)
    gpu = default_gpu()
    info = {} if gpu is None else mx.device_info()
    name = f"cpu, BLAS: {BLAS}" if gpu is None else f"{info.get('device_name', 'GPU')} ({gpu})"
    return BackendReport(
        mlx_version=version("mlx"),
        device=name,
        memory=device_memory(),
        wired=int(info[_WIRED]) if gpu is Gpu.METAL and _WIRED in info else None,
        has_kernels=gpu is not None or isinstance(platform, CPUPlatform),
        kernels=platform.kernels_line(""),
    )


def gpu_memory() -> tuple[int, int] | None:
    """Return the bytes that a GPU has for arrays, and those that are free; None without a GPU."""
    if default_gpu() is None:
        return None
    return device_memory(), free_memory()
