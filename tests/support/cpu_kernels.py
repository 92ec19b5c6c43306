"""The kernels' own sources on the CPU, as lazy operations of MLX: what `mx.fast` makes of them on a GPU."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.platforms.gpu.kernels.sources import KernelSource, Launch, Target
from batching.backend.platforms.gpu.source_kernels import Kernel, SourceKernels
from tests.kernels.cpu_target import NUMPY_DTYPES, CPUKernel
from tests.support.host_kernels import view


def cpu_kernels(native: Native) -> SourceKernels:
    """Return the pool's kernels, compiled for the CPU."""

    def make(_: Target, source: KernelSource) -> Kernel:
        kernel = CPUKernel(source)
        names = [*source.inputs, *source.outputs]
        types: list[Any] = [NUMPY_DTYPES[source.dtypes[name]] for name in names]

        def call(
            *,
            inputs: Sequence[mx.array],
            output_shapes: Sequence[Sequence[int]],
            output_dtypes: Sequence[mx.Dtype],
            grid: tuple[int, int, int],
            threadgroup: tuple[int, int, int],
        ) -> list[mx.array]:
            dtypes = [*(array.dtype for array in inputs), *output_dtypes]
            for name, dtype in zip(names, dtypes, strict=True):
                assert str(dtype) == f"mlx.core.{source.dtypes[name]}", f"{name} is {dtype}"
            shapes = [*(array.shape for array in inputs), *output_shapes]

            def run(sources: Sequence[int], targets: Sequence[int]) -> None:
                addresses = zip((*sources, *targets), shapes, types, strict=True)
                arrays = [view(*each) for each in addresses]
                kernel(arrays[: len(sources)], arrays[len(sources) :], Launch(grid, threadgroup))

            made: list[mx.array] = native.module.host_kernel(
                run, list(inputs), list(map(list, output_shapes)), list(output_dtypes)
            )
            return made

        return call

    return SourceKernels(Target.CPU, make)
