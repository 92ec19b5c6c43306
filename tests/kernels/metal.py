"""Checks the kernels' address spaces for Metal, without Apple's compiler: clang takes them as C++ for OpenCL.

Both languages have the same four address spaces.  What clang accepts, Apple's compiler need not.
"""

import shutil
import subprocess
from pathlib import Path
from typing import Final

from batching.backend.gpu.kernels.sources import KernelSource, Target, c_type

_STAND_IN: Final = Path(__file__).parent / "metal_stand_in.h"
_ATTRIBUTES: Final = {
    "thread_index_in_threadgroup": "uint",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
}


class DoesNotCompile(Exception):
    """clang's words."""


def compiler() -> str | None:
    """Return clang 14 or newer, or None."""
    names = ("clang", *(f"clang-{version}" for version in range(22, 13, -1)))
    return next(filter(None, map(shutil.which, names)), None)


def translation_unit(source: KernelSource) -> str:
    """Return what MLX would make of a kernel."""
    parameters = []
    for name in (*source.inputs, *source.outputs):
        const = "const " if name in source.inputs else ""
        parameters.append(f"{const}device {c_type(Target.METAL, source.dtypes[name])}* {name}")
        if f"{name}_shape" in source.source and name in source.inputs:
            parameters.append(f"const constant int* {name}_shape")
    for name, kind in _ATTRIBUTES.items():
        assert name in source.source, f"MLX does not pass {name} unless the source has it"
        parameters.append(f"{kind} {name}")
    return f"""\
{_STAND_IN.read_text()}
{source.header}
kernel void custom_kernel_{source.name}({", ".join(parameters)}) {{
{source.source}
}}
"""


def check(source: KernelSource) -> None:
    """Raises DoesNotCompile."""
    clang = compiler()
    assert clang is not None
    command = [
        *(clang, "-x", "clcpp", "-cl-std=clc++2021", "-fsyntax-only", "-Werror", "-Wall"),
        *("-Wno-unused", "-Wno-unknown-pragmas", "-target", "spir64", "-cl-single-precision-constant"),
        # Without a generic address space a pointer needs one of its own, as in Metal.
        *("-Xclang", "-cl-ext=-all,+cl_khr_fp16,+cl_khr_fp64,+__opencl_c_fp64", "-"),
    ]
    text = translation_unit(source)
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DoesNotCompile(done.stderr)
