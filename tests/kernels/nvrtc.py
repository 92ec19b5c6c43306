"""Compiles kernels for CUDA as MLX 0.32 does, which takes no GPU: NVRTC of PyPI, through ctypes.

`make test-kernels` installs it into an environment of its own.
"""

import ctypes
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from batching.backend.platforms.gpu.kernels.sources import KernelSource, Target, c_type

ROOT: Final = Path(__file__).parents[2]
# Stands for what MLX puts before each kernel: the same headers of CUDA, and the types of shapes.
_UTILS_NAME: Final = "mlx/backend/cuda/device/utils.cuh"
_UTILS: Final = """\
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda/std/array>
#include <cuda/std/limits>
#include <cuda/std/tuple>
namespace mlx::core::cu {
using Shape = cuda::std::array<int32_t, 10>;
using Strides = cuda::std::array<int64_t, 10>;
}
"""
_RESOURCES: Final = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)
_SHARED: Final = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Resources:
    """What a thread, and a group's shared memory, take; stack and spills are in memory, and slow."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int


class DoesNotCompile(Exception):
    """NVRTC's words."""


def home() -> Path | None:
    """Return the folder of NVRTC and of CUDA's headers, or None."""
    found = sorted(ROOT.glob(".venv-kernels/lib/python*/site-packages/nvidia/cu13"))
    return found[0] if found else None


def translation_unit(source: KernelSource) -> str:
    """Return what MLX would make of a kernel."""
    parameters = []
    for name in (*source.inputs, *source.outputs):
        const = "const " if name in source.inputs else ""
        parameters.append(f"{const}{c_type(Target.CUDA, source.dtypes[name])}* {name}")
        if f"{name}_shape" in source.source and name in source.inputs:
            parameters.append(f"const __grid_constant__ Shape {name}_shape")
    return f"""\
#include "{_UTILS_NAME}"
#include <cooperative_groups.h>
#define inf cuda::std::numeric_limits<float>::infinity()
{source.header}
namespace mlx::core::cu {{
namespace cg = cooperative_groups;
__global__ void custom_kernel_{source.name}({", ".join(parameters)}) {{
{source.source}
}}
}}
"""


def compile_kernel(source: KernelSource, architecture: str) -> Resources:
    """Compile a kernel for a GPU, such as "sm_90a".

    Raises DoesNotCompile.
    """
    library, folder = _library(), home()
    assert folder is not None
    program = ctypes.c_void_p()
    _check(
        library.nvrtcCreateProgram(
            ctypes.byref(program),
            translation_unit(source).encode(),
            f"{source.name}.cu".encode(),
            1,
            (ctypes.c_char_p * 1)(_UTILS.encode()),
            (ctypes.c_char_p * 1)(_UTILS_NAME.encode()),
        )
    )
    options = [
        "--device-as-default-execution-space",
        f"--gpu-architecture={architecture}",
        f"--include-path={folder / 'include' / 'cccl'}",
        f"--include-path={folder / 'include'}",
        "--ptxas-options=-v",
    ]
    status = library.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    )
    size = ctypes.c_size_t()
    _check(library.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
    log = ctypes.create_string_buffer(size.value)
    _check(library.nvrtcGetProgramLog(program, log))
    library.nvrtcDestroyProgram(ctypes.byref(program))
    text = log.value.decode()
    found = _RESOURCES.search(text)
    if status or not found:
        raise DoesNotCompile(text)
    shared = _SHARED.search(text)
    return Resources(
        int(found["registers"]),
        int(found["stack"]),
        int(found["stores"]) + int(found["loads"]),
        int(shared[1]) if shared else 0,
    )


@cache
def _library() -> Any:
    folder = home()
    assert folder is not None
    return ctypes.CDLL(str(folder / "lib" / "libnvrtc.so.13"))


def _check(status: int) -> None:
    assert status == 0, f"NVRTC returns {status}"
