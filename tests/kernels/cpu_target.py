"""Runs kernels of the dialect on the CPU: compiled by the system's C++ compiler, threads as fibers.

    kernel = CPUKernel(PagedDecode(...).source(Target.CPU))
    kernel([queries, ...], [partials, stats], launch)

The arrays are numpy's, bfloat16 as uint16; a kernel writes into them, into the pools too.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from batching.backend.platforms.gpu.kernels.sources import (
    DType,
    KernelSource,
    Launch,
    Target,
    c_type,
)

Array: TypeAlias = NDArray[Any]

ROOT: Final = Path(__file__).parents[2]
_FOLDER: Final = Path(__file__).parent
_BUILD: Final = ROOT / "build" / "kernels"
# Forward, backward, and two shuffled ones.
ORDERS: Final = (0, 1, 2, 3)
NUMPY_DTYPES: Final[dict[DType, np.dtype[Any]]] = {
    DType.FLOAT16: np.dtype(np.float16),
    DType.BFLOAT16: np.dtype(np.uint16),
    DType.FLOAT32: np.dtype(np.float32),
    DType.INT8: np.dtype(np.int8),
    DType.INT32: np.dtype(np.int32),
    DType.UINT32: np.dtype(np.uint32),
}


class Build(StrEnum):
    """PLAIN: a library for this process; the others: programs, watched by a sanitizer."""

    PLAIN = "plain"
    MEMORY = "memory"
    THREADS = "threads"


_FLAGS: Final = {
    # 1 + a * b is rounded twice, as it is written, whatever the processor.
    Build.PLAIN: ("-O2", "-fPIC"),
    Build.MEMORY: ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    Build.THREADS: ("-O1", "-g1", "-fsanitize=thread"),
}


class KernelFailed(Exception):
    """A kernel did what no GPU allows, or a sanitizer found something: its words."""


class CPUKernel:
    """A kernel; one for a GPU has that GPU's words on fibers, instead of the CPU's own."""

    def __init__(self, source: KernelSource) -> None:
        self.source = source
        self._run = ctypes.CDLL(str(build(source, Build.PLAIN))).run

    def __call__(
        self,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        launch: Launch,
        order: int = 0,
    ) -> None:
        """Compute the outputs, which begin as what they hold, and write into inputs that are pools.

        Raises KernelFailed.
        """
        arrays = [*inputs, *outputs]
        check_arrays(self.source, arrays)
        pointers = (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
        sizes = [(ctypes.c_int * array.ndim)(*array.shape) for array in arrays]
        shapes = (ctypes.c_void_p * len(arrays))(*map(ctypes.addressof, sizes))
        grid = (ctypes.c_int * 3)(*launch.grid)
        error = ctypes.create_string_buffer(200)
        if self._run(pointers, shapes, grid, launch.threads[0], order, error, len(error)):
            raise KernelFailed(error.value.decode())


def run_watched(
    source: KernelSource,
    watch: Build,
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    launch: Launch,
    orders: Iterable[int] = ORDERS,
) -> None:
    """Run a kernel under a sanitizer, in several orders, whose results must be the same bits.

    outputs: of which only the shapes and dtypes count.
    Raises KernelFailed.
    """
    arrays = [*inputs, *outputs]
    check_arrays(source, arrays)
    numbers = [len(arrays), len(inputs), *launch.grid, launch.threads[0]]
    with tempfile.NamedTemporaryFile() as case:
        case.write(np.array(numbers, np.int64).tobytes())
        for i, array in enumerate(arrays):
            case.write(np.array([array.nbytes, array.ndim, *array.shape], np.int64).tobytes())
            if i < len(inputs):
                case.write(array.tobytes())
        case.flush()
        command = [str(build(source, watch)), case.name, *map(str, orders)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise KernelFailed(f"exit {result.returncode}: {result.stderr}")


def check_arrays(source: KernelSource, arrays: Sequence[Array]) -> None:
    names = [*source.inputs, *source.outputs]
    assert len(arrays) == len(names), f"{source.name} takes {names}"
    for name, array in zip(names, arrays, strict=True):
        expected = NUMPY_DTYPES[source.dtypes[name]]
        assert array.dtype == expected, f"{name} is {array.dtype}, not {expected}"
        assert array.flags.c_contiguous, f"{name} is not contiguous"
        # Those of a tiny model's decode are few.
        assert array.size >= 8 or name == "stats", f"{name} has {array.size} elements, below 8"


def translation_unit(source: KernelSource) -> str:
    """Return the C++ of a kernel: as MLX does it, parameters are the buffers by their names."""
    stand_ins = "" if source.target is Target.CPU else '#include "tests/kernels/stand_ins.h"'
    parameters = []
    for i, name in enumerate((*source.inputs, *source.outputs)):
        const = "const " if name in source.inputs else ""
        pointer = f"{const}{c_type(source.target, source.dtypes[name])}*"
        parameters.append(f"{pointer} {name} = static_cast<{pointer}>(buffers[{i}]);")
        if f"{name}_shape" in source.source and name in source.inputs:
            parameters.append(f"const int* {name}_shape = shapes[{i}];")
    declarations = "\n".join(parameters)
    return f"""\
{stand_ins}
{source.header}

namespace {{
void body(void* const* buffers, const int* const* shapes) {{
(void)shapes;
{declarations}
{source.source}
}}
}}

extern "C" int run(void* const* buffers, const int* const* shapes, const int* grid, int threads,
                   int order, char* error, std::size_t error_size) {{
  const Kernel kernel{{body, buffers, shapes}};
  return run_kernel(&kernel, grid, threads, order, error, error_size);
}}
"""


def build(source: KernelSource, watch: Build) -> Path:
    """Return the library or the program of a kernel, which is built once."""
    text = translation_unit(source)
    digest = hashlib.sha256(f"{text}{_runtime_text()}{_FLAGS[watch]}".encode()).hexdigest()[:12]
    path = _BUILD / f"{source.name}-{watch}-{digest}"
    if path.exists():
        return path
    runtime = [_runtime("fibers", watch)]
    if watch is not Build.PLAIN:
        runtime.append(_runtime("main", watch))
        _compile(text, path, _FLAGS[watch], runtime)
    else:
        _compile(text, path, (*_FLAGS[watch], "-shared"), runtime)
    return path


def _runtime(name: str, watch: Build) -> Path:
    """Return the object file of what runs the kernels."""
    digest = hashlib.sha256(f"{_runtime_text()}{_FLAGS[watch]}".encode()).hexdigest()[:12]
    path = _BUILD / f"{name}-{watch}-{digest}.o"
    if not path.exists():
        # In TSan's build the fibers are not watched: what they note of all threads is no race.
        watched = name != "fibers" or watch is not Build.THREADS
        flags = _FLAGS[watch] if watched else ("-O2", "-DTHREADS_WATCHED")
        _compile((_FOLDER / f"{name}.cpp").read_text(), path, (*flags, "-c"))
    return path


@cache
def _runtime_text() -> str:
    return "".join((_FOLDER / name).read_text() for name in ("fibers.cpp", "fibers.h", "main.cpp"))


def _compile(text: str, path: Path, flags: Sequence[str], objects: Sequence[Path] = ()) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        result = Path(folder) / path.name
        command = [
            *(compiler(), "-std=c++20", "-ffp-contract=off", f"-I{ROOT}", *flags),
            *(
                "-Wall",
                "-Wextra",
                "-Wno-unused",
                "-Wno-deprecated",
                "-Wno-unknown-pragmas",
                "-Werror",
                "-x",
                "c++",
                "-",
                "-x",
                "none",
            ),
            *(*map(str, objects), "-o", str(result)),
        ]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        # Atomic: another process may have built it meanwhile.
        os.replace(result, path)


def compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "c++"))
    assert found is not None, "there is no C++ compiler"
    return found
