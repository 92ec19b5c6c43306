"""The pool's kernels, made from their sources by MLX."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

import mlx.core as mx

from batching.backend.devices import Gpu
from batching.backend.paged.layout import LayerShape
from batching.backend.platforms.gpu.kernels.definitions import (
    KVWrite,
    MergeSplits,
    NormRopeWrite,
    PagedDecode,
    PoolShape,
)
from batching.backend.platforms.gpu.kernels.sources import DType, KernelSource, Launch, Target
from batching.backend.platforms.gpu.pool_kernels import (
    MIN_ELEMENTS,
    DecodeRows,
    HeadNorms,
    KernelPool,
    PoolKernels,
    Rotation,
)

_DTYPES: Final = {
    mx.float16: DType.FLOAT16,
    mx.bfloat16: DType.BFLOAT16,
    mx.float32: DType.FLOAT32,
    mx.int8: DType.INT8,
}


class Kernel(Protocol):
    """A kernel as `mx.fast.metal_kernel` and `mx.fast.cuda_kernel` return it."""

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
    ) -> list[mx.array]: ...


class Definition(Protocol):
    def source(self, target: Target) -> KernelSource: ...


D = TypeVar("D", bound=Definition)


class _Output(NamedTuple):
    shape: Sequence[int]
    dtype: mx.Dtype


def load_kernels(gpu: Gpu) -> PoolKernels:
    """Return the kernels of a GPU; whether they run there is seen later."""
    return SourceKernels(Target.METAL if gpu is Gpu.METAL else Target.CUDA, _by_mlx)


def _by_mlx(target: Target, source: KernelSource) -> Kernel:
    make = mx.fast.metal_kernel if target is Target.METAL else mx.fast.cuda_kernel
    made: Kernel = make(  # type: ignore[assignment]  # an object, in MLX's stubs
        name=source.name,
        input_names=source.inputs,
        output_names=source.outputs,
        source=source.source,
        header=source.header,
    )
    return made


@dataclass(frozen=True, eq=False)
class SourceKernels:
    """`PoolKernels` of a target.

    make: returns a kernel; each is made once.
    """

    target: Target
    make: Callable[[Target, KernelSource], Kernel]
    # By the class of the definition and its constants.
    _made: dict[tuple[object, ...], Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"on, for {self.target}"

    def why_not(self, shape: LayerShape) -> str:
        if shape.dtype not in _DTYPES:
            return f"they keep no keys and values in {str(shape.dtype).removeprefix('mlx.core.')}"
        try:
            PoolShape(
                shape.num_heads,
                shape.key_dim,
                shape.latent_dim or shape.value_dim,
                _DTYPES[shape.dtype],
                values_in_keys=shape.is_latent,
            )
        except ValueError as error:
            return str(error)
        return ""

    def write(
        self,
        rows: Sequence[mx.array],
        slots: mx.array,
        pool: KernelPool,
        token: mx.array,
    ) -> mx.array:
        dtype = rows[0].dtype
        made = self._made_once(KVWrite, pool, dtype)
        # A cast to the same type is none.
        values, scales = [each.astype(dtype) for each in rows[:2]], map(_padded, rows[2:])
        inputs = [*values, *scales, slots, *pool.arrays, token]
        [next_token] = made.run(inputs, [_like(token)], made.definition.launch(len(rows[0])))
        return next_token

    def rotate_and_write(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        rotation: Rotation,
        norms: HeadNorms | None,
        positions: mx.array,
        slots: mx.array,
        pool: KernelPool,
        token: mx.array,
    ) -> tuple[mx.array, mx.array]:
        dtype = queries.dtype
        made = self._made_once(
            NormRopeWrite,
            pool,
            dtype,
            queries.shape[1],
            rotation.num_dims,
            rotation.is_traditional,
            norms.eps if norms else None,
            rotation.factor,
        )
        rows = [each.astype(dtype) for each in (queries, keys, values, *(norms or ())[:2])]
        inputs = [*rows, rotation.radians, positions, slots, *pool.arrays, token]
        launch = made.definition.launch(len(keys))
        rotated, next_token = made.run(inputs, [_like(queries), _like(token)], launch)
        return rotated, next_token

    def decode(
        self,
        queries: mx.array,
        rows: DecodeRows,
        pool: KernelPool,
        token: mx.array,
        *,
        scale: float,
        soft_cap: float,
        sinks: mx.array | None,
    ) -> tuple[mx.array, mx.array]:
        num_rows, num_heads, _ = queries.shape
        value_dim, dtype = pool.value_dim, queries.dtype
        decode = self._made_once(
            PagedDecode, pool, dtype, num_heads, pool.block_size, scale, soft_cap
        )
        num_splits = decode.definition.num_splits(rows.tables.shape[1] * pool.block_size)
        by_split = (num_rows, num_heads, num_splits)
        partials, stats = decode.run(
            [queries, *pool.arrays, *rows, token],
            [_Output((*by_split, value_dim), mx.float32), _Output((*by_split, 2), mx.float32)],
            decode.definition.launch(num_rows, num_splits),
        )
        merge = self._made_once(MergeSplits, None, dtype, num_heads, value_dim, sinks is not None)
        attended, next_token = merge.run(
            [partials, stats, *([] if sinks is None else [sinks]), token],
            [_Output((num_rows, num_heads, value_dim), dtype), _like(token)],
            merge.definition.launch(num_rows),
        )
        return attended, next_token

    def _made_once(
        self,
        kind: Callable[..., D],
        pool: KernelPool | None,
        dtype: mx.Dtype,
        *constants: float | None,
    ) -> "_Made[D]":
        """Return a kernel of these constants, those of a pool among them."""
        # A layer asks for three in each step: what names them is quicker to look up than their definitions.
        of_pool = () if pool is None else pool.constants
        key = (kind, dtype, *constants, *of_pool)
        if (found := self._made.get(key)) is None:
            shape = () if pool is None else (_pool_shape(pool),)
            definition = kind(*shape, _DTYPES[dtype], *constants)
            kernel = self.make(self.target, definition.source(self.target))
            found = self._made[key] = _Made(definition, kernel)
        return found


@dataclass(frozen=True, eq=False)
class _Made(Generic[D]):
    definition: D
    kernel: Kernel

    def run(
        self, inputs: Sequence[mx.array], outputs: Sequence[_Output], launch: Launch
    ) -> list[mx.array]:
        return self.kernel(
            inputs=inputs,
            output_shapes=[output.shape for output in outputs],
            output_dtypes=[output.dtype for output in outputs],
            grid=launch.grid,
            threadgroup=launch.threads,
        )


def _pool_shape(pool: KernelPool) -> PoolShape:
    return PoolShape(
        pool.num_heads,
        pool.keys.shape[1],
        pool.value_dim,
        _DTYPES[pool.keys.dtype],
        values_in_keys=len(pool.arrays) == 1,
    )


def _padded(scales: mx.array) -> mx.array:
    """Return scales as the kernels take them."""
    num_missing = max(0, MIN_ELEMENTS - scales.size)
    return mx.pad(scales.flatten(), (0, num_missing)) if num_missing else scales.flatten()


def _like(array: mx.array) -> _Output:
    return _Output(array.shape, array.dtype)
