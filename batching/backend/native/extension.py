"""Finds the extension, or says why it is not used."""

import importlib
import importlib.metadata
import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from batching.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class Native:
    """The kernels of this processor's instruction set, and their threads."""

    module: Any  # _native, which need not be there
    isa: str
    num_threads: int

    def __str__(self) -> str:
        return f"{self.isa}, {self.num_threads} threads"


@dataclass(frozen=True, slots=True)
class NoNative:
    reason: str

    def __str__(self) -> str:
        return f"off: {self.reason}"


def load_native(mode: str) -> Native | NoNative:
    """Return the kernels if `mode` ("auto", "off", "require") and the machine allow.

    Raises:
        ModelLoadError: they are required and not there.
    """
    if mode == "off":
        return NoNative("switched off")
    found = _load() if mx.default_device() == mx.cpu else NoNative("MLX computes on a GPU")
    if isinstance(found, NoNative) and mode == "require":
        raise ModelLoadError(f"the native kernels are required, and {found.reason}")
    return found


@cache
def _load() -> Native | NoNative:
    try:
        module = importlib.import_module("batching.backend.native._native")
    except ModuleNotFoundError:
        return NoNative("the extension is not built: make install, with a C++ compiler")
    except ImportError as error:
        return NoNative(f"the extension cannot be loaded: {error}")
    if module.mlx_version != (installed := importlib.metadata.version("mlx")):
        return NoNative(f"it was built for mlx {module.mlx_version}, and mlx {installed} is here")
    if not module.isa():
        return NoNative("this processor has none of the instruction sets that they need")
    module.set_num_threads(num_cores())
    return Native(module, module.isa(), module.num_threads())


def num_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
