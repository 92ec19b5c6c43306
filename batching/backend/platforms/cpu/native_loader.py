"""Loads the extension with the native CPU kernels, or finds the reason why it is not used."""

import importlib
import importlib.metadata
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any, Final

import mlx.core as mx

from batching.backend.memory.device import count_too
from batching.backend.processor.cores import Nodes, usable_cores
from batching.errors import ModelLoadError

# The interface of `mlx_cpu_kernels`, a package that is installed by itself: kernels/README.md.
INTERFACE_VERSION: Final = 4


@dataclass(frozen=True, slots=True)
class Native:
    """The native kernels for the instruction set of this processor, and their threads.

    cores: the cores that the process may use, for the start-up banner.
    nodes: the NUMA nodes among which the threads are divided, if there are several.
    min_input_bits: the fewest bits of activations that are multiplied with quantized weights: 8, scaled by
        channel, with weights of up to 4 bits only; 32 is not rounded at all.
    supports_bfloat16: a matrix unit multiplies in bfloat16.
    missing_isa: a faster instruction set of the processor for which the extension was not built, or "".
    """

    module: Any  # _native, which need not be there
    isa: str
    num_threads: int
    min_input_bits: int
    supports_bfloat16: bool = False
    missing_isa: str = ""
    cores: str = ""
    nodes: Nodes = ()

    def __str__(self) -> str:
        without = f" (built without {self.missing_isa})" if self.missing_isa else ""
        return f"{self.isa}{without}, {self.num_threads} threads on {self.cores}"


@dataclass(frozen=True, slots=True)
class NoNative:
    reason: str

    def __str__(self) -> str:
        return f"off: {self.reason}"


def load_native(mode: str, num_threads: int | None = None) -> Native | NoNative:
    """Return the kernels if `mode` ("auto", "off", "require") and the machine allow.

    All engines of a process share the threads of the kernels.  An engine that is loaded while no other
    has weights sets their number, since others might compute at this moment.

    num_threads: at most one for each hardware thread that the process may use; None follows from the
        number of cores.

    Raises:
        ModelLoadError: the kernels are required but not available.
    """
    if mode == "off":
        return NoNative("switched off")
    found = _load() if mx.default_device() == mx.cpu else NoNative("MLX computes on a GPU")
    if isinstance(found, Native):
        cores = usable_cores()
        if not found.module.weight_bytes():
            count = min(num_threads or cores.count, cores.max_threads)
            found.module.set_num_threads(count, cores.nodes_of(count))
        count = found.module.num_threads()
        return replace(
            found,
            num_threads=count,
            cores=str(cores),
            nodes=cores.nodes_of(count),
        )
    if mode == "require":
        raise ModelLoadError(f"the native kernels are required, and {found.reason}")
    return found


@cache
def _load() -> Native | NoNative:
    try:
        package = importlib.import_module("mlx_cpu_kernels")
        # An extension that does not fit is not loaded: its first call could end the process.
        if (reason := _misfit(package)) is not None:
            return NoNative(reason)
        module = importlib.import_module("mlx_cpu_kernels._native")
    except ModuleNotFoundError:
        return NoNative("mlx-cpu-kernels is not installed: pip install ./kernels")
    except ImportError as error:
        return NoNative(f"mlx-cpu-kernels cannot be loaded: {error}")
    if not module.isa():
        return NoNative("mlx-cpu-kernels was built for none of this processor's instruction sets")
    count_too("packed weights", module.weight_bytes)
    return Native(
        module,
        module.isa(),
        module.num_threads(),
        module.min_input_bits(),
        module.supports_bfloat16(),
        module.missing_isa(),
    )


def _misfit(package: ModuleType) -> str | None:
    """Return why the extension of a package must not be called from here, or None."""
    interface = getattr(package, "INTERFACE_VERSION", None)
    if interface != INTERFACE_VERSION:
        return (
            f"mlx-cpu-kernels has interface {interface}, and this server needs {INTERFACE_VERSION}"
        )
    built_for, installed = package.MLX_VERSION, importlib.metadata.version("mlx")
    if built_for != installed:
        return f"mlx-cpu-kernels was built for mlx {built_for}, and mlx {installed} is here"
    return None
