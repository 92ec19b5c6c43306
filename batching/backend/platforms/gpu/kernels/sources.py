"""Kernels as text, for `mx.fast.metal_kernel`, `mx.fast.cuda_kernel` and the CPU of the tests.

A kernel is a body in the dialect (`*.inl`), written once, and a frozen dataclass of its constants, which are
compiled in (definitions.py):

    decode = PagedDecode(num_heads=32, num_kv_heads=8, key_dim=128, ...)
    source = decode.source(Target.METAL)
    kernel = mx.fast.metal_kernel(
        name=source.name, input_names=source.inputs, output_names=source.outputs,
        source=source.source, header=source.header)
    launch = decode.launch(num_rows=8, num_splits=4)
    kernel(inputs=..., output_shapes=..., output_dtypes=..., grid=launch.grid, threadgroup=launch.threads)

Inputs and outputs have the names, order and shapes that each class gives.  An input needs eight elements or
more: MLX compiles another kernel for fewer, and one of the two at a time.  docs/architecture/gpu.md tells how
to write a body.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Final, Self, TypeAlias

_FOLDER: Final = Path(__file__).parent


@cache
def sources_digest() -> str:
    """Return a digest of the texts that kernels are made of, and of what makes them."""
    files = sorted(path for path in _FOLDER.iterdir() if path.suffix in {".inl", ".h", ".py"})
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


class Target(StrEnum):
    METAL = "metal"
    CUDA = "cuda"
    # Threads are fibers: tests/kernels.
    CPU = "cpu"


class DType(StrEnum):
    """The types of a kernel's inputs and outputs; the values are MLX's names."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    INT8 = "int8"
    INT32 = "int32"
    UINT32 = "uint32"


_C_TYPES: Final = {
    Target.METAL: {
        DType.FLOAT16: "half",
        DType.BFLOAT16: "bfloat",
        DType.FLOAT32: "float",
        DType.INT8: "int8_t",
        DType.INT32: "int",
        DType.UINT32: "unsigned",
    },
    Target.CUDA: {
        DType.FLOAT16: "__half",
        DType.BFLOAT16: "__nv_bfloat16",
        DType.FLOAT32: "float",
        DType.INT8: "int8_t",
        DType.INT32: "int",
        DType.UINT32: "unsigned",
    },
    Target.CPU: {
        DType.FLOAT16: "half",
        DType.BFLOAT16: "bfloat16",
        DType.FLOAT32: "float",
        DType.INT8: "int8_t",
        DType.INT32: "int",
        DType.UINT32: "unsigned",
    },
}

# MLX looks for Metal's attributes in the source itself, and passes those that it finds.
_INDEXES: Final = {
    Target.METAL: """\
const int thread_id = int(thread_index_in_threadgroup);
const int3 group = int3(threadgroup_position_in_grid);
const int3 groups = int3(threadgroups_per_grid);
""",
    Target.CUDA: """\
const int thread_id = int(threadIdx.x);
const int3 group = make_int3(blockIdx.x, blockIdx.y, blockIdx.z);
const int3 groups = make_int3(gridDim.x, gridDim.y, gridDim.z);
""",
    Target.CPU: """\
const int thread_id = dialect::thread_index();
const int3 group = dialect::group_index();
const int3 groups = dialect::num_groups();
""",
}


@dataclass(frozen=True)
class Launch:
    """grid: in threads, as MLX's; threads: of a group."""

    grid: tuple[int, int, int]
    threads: tuple[int, int, int]

    @classmethod
    def of_groups(cls, threads: int, x: int, y: int = 1, z: int = 1) -> Self:
        return cls((threads * x, y, z), (threads, 1, 1))


@dataclass(frozen=True)
class KernelSource:
    """The source of a kernel as MLX's functions take it.

    name: another for each text: on CUDA MLX keeps compiled kernels by their name alone.
    """

    target: Target
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    header: str
    source: str
    # The types of inputs and outputs, by name.
    dtypes: Mapping[str, DType]


_Constants: TypeAlias = Mapping[str, int | float | bool | DType]


def kernel_source(
    body: str,
    target: Target,
    inputs: Mapping[str, DType],
    outputs: Mapping[str, DType],
    constants: _Constants,
) -> KernelSource:
    """Return a body of the dialect for a target.

    body: the name of its file.
    constants: what the body calls them; a dtype is a type.
    """
    lines = [_definition(target, name, value) for name, value in constants.items()]
    header = "\n".join([_text(f"{target}.h"), *lines, ""])
    source = _INDEXES[target] + _text(f"{body}.inl")
    digest = hashlib.sha256((header + source).encode()).hexdigest()[:12]
    return KernelSource(
        target,
        f"{body}_{digest}",
        tuple(inputs),
        tuple(outputs),
        header,
        source,
        {**inputs, **outputs},
    )


def c_type(target: Target, dtype: DType) -> str:
    """Return what `target` calls a dtype."""
    return _C_TYPES[target][dtype]


@cache
def _text(file: str) -> str:
    return (_FOLDER / file).read_text(encoding="utf-8")


def _definition(target: Target, name: str, value: int | float | bool | DType) -> str:
    if isinstance(value, DType):
        return f"typedef {c_type(target, value)} {name};"
    if isinstance(value, float):
        return f"#define {name} {value!r}f"
    return f"#define {name} {int(value)}"
