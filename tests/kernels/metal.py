"""Checks the kernels' address spaces for Metal, without Apple's compiler: clang takes them as C++ for OpenCL.

Both languages have the same four address spaces.  What clang accepts, Apple's compiler need not.  `make
test-kernels` installs libclang of PyPI into an environment of its own.
"""

import json
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Final

from batching.backend.platforms.gpu.kernels.sources import KernelSource, Target, c_type

ROOT: Final = Path(__file__).parents[2]
_STAND_IN: Final = Path(__file__).parent / "metal_stand_in.h"
# Where clang includes its own declarations of OpenCL, it gets ours of Metal.
_INCLUDED: Final = "/stand-in/opencl-c-base.h"
_OPTIONS: Final = (
    *("-x", "clcpp", "-cl-std=clc++2021", "-target", "spir64", "-Wall", "-Wno-unused"),
    f"-I{Path(_INCLUDED).parent}",
    # Without a generic address space each pointer needs one of its own, as in Metal.
    *("-Xclang", "-cl-ext=-all,+cl_khr_fp16,+cl_khr_fp64,+__opencl_c_fp64"),
)
# For the Python that has libclang.
_PARSE: Final = """\
import json, sys
from clang.cindex import Index
options, files = json.load(sys.stdin)
unit = Index.create().parse("kernel.cpp", options, files)
json.dump([f"{each.location.line}: {each.spelling}" for each in unit.diagnostics], sys.stdout)
"""
_ATTRIBUTES: Final = {
    "thread_index_in_threadgroup": "uint",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
}


class DoesNotCompile(Exception):
    """clang's words."""


def python() -> Path | None:
    """Return the Python that has libclang, or None."""
    found = ROOT / ".venv-kernels" / "bin" / "python"
    return found if found.exists() else None


def translation_unit(source: KernelSource, small: Collection[str] = ()) -> str:
    """Return what MLX would make of a kernel, whose `small` inputs have fewer than eight elements."""
    parameters = []
    for name in (*source.inputs, *source.outputs):
        const = "const " if name in source.inputs else ""
        space = "constant" if name in small else "device"
        parameters.append(f"{const}{space} {c_type(Target.METAL, source.dtypes[name])}* {name}")
        if f"{name}_shape" in source.source and name in source.inputs:
            parameters.append(f"const constant int* {name}_shape")
    for name, kind in _ATTRIBUTES.items():
        assert name in source.source, f"MLX does not pass {name} unless the source has it"
        parameters.append(f"{kind} {name}")
    return f"""\
{source.header}
kernel void custom_kernel_{source.name}({", ".join(parameters)}) {{
{source.source}
}}
"""


def check(source: KernelSource, small: Collection[str] = ()) -> None:
    """Compile a kernel, whose `small` inputs have fewer than eight elements.

    Raises DoesNotCompile, also for a warning.
    """
    interpreter = python()
    assert interpreter is not None
    files = [("kernel.cpp", translation_unit(source, small)), (_INCLUDED, _STAND_IN.read_text())]
    done = subprocess.run(
        [str(interpreter), "-c", _PARSE],
        input=json.dumps([_OPTIONS, files]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if said := json.loads(done.stdout):
        raise DoesNotCompile("\n".join(said))
