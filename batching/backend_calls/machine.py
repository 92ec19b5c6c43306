"""What this machine has for a model: memory, a GPU or kernels; MLX is asked only where there may be a GPU."""

import importlib.metadata
import importlib.util
import os
import sys
from dataclasses import dataclass
from typing import Final

from batching.config import EngineConfig
from batching.fit.weights import Compute
from batching.host.backend_report import BackendReport
from batching.host.memory import available_memory, memory_limit

_KERNELS: Final = "mlx_cpu_kernels"
# The packages of MLX's CUDA backend.
_CUDA: Final = ("mlx-cuda", "mlx-cuda-12", "mlx-cuda-13")


@dataclass(frozen=True, slots=True)
class Machine:
    """The memory that models may take on the device, in bytes.

    free: of it, what is free now; None where the system does not say.
    """

    compute: Compute
    memory: int
    free: int | None

    def missing(self, needed: int) -> int:
        """Return how many bytes are missing for a model; 0 if it fits."""
        return max(0, needed - self.memory)


def this_machine(config: EngineConfig) -> Machine:
    """Return what a model with a configuration finds here."""
    if config.device != "cpu" and may_have_gpu():
        from batching.backend.builder.report import gpu_memory

        if (memory := gpu_memory()) is not None:
            return Machine(Compute.STORED, *memory)
    has_kernels = config.native != "off" and importlib.util.find_spec(_KERNELS) is not None
    compute = Compute.KERNELS if has_kernels else Compute.FLOATS
    return Machine(compute, host_memory(), available_memory())


def host_memory() -> int:
    """Return the bytes of this machine's memory, or of what its control groups let this process have."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(physical, memory_limit() or physical)


def may_have_gpu() -> bool:
    """Return whether MLX may have a GPU, without importing MLX."""
    return sys.platform == "darwin" or any(map(_is_installed, _CUDA))


def report_backend(config: EngineConfig) -> BackendReport:
    """Import MLX and ask it.

    Raises:
        ModelLoadError: what is required is not here.
    """
    from batching.backend.builder.report import report

    return report(config)


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
