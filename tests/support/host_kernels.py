"""The kernels of a GPU's pool on the host: as lazy as those, and writing in place as they do.

`_native.host_kernel` calls a function of numpy when MLX evaluates the operation, with the memory of the pool
itself, so that a read sees whatever has been written by then.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from batching.backend.paged.layout import LayerShape
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.platforms.gpu.pool_kernels import DecodeRows, HeadNorms, KernelPool, Rotation

Array = npt.NDArray[Any]
# Given the arrays of an operation's inputs, returns those of its outputs.
Run = Callable[..., Sequence[Array]]

_TYPES: Final = {mx.float32: np.float32, mx.uint32: np.uint32, mx.int32: np.int32}


def host_kernel(
    native: Native, run: Run, inputs: Sequence[mx.array], outputs: Sequence[mx.array]
) -> list[mx.array]:
    """Return what `run` computes, in float32 and integers; outputs are as those given."""
    types = [(array.shape, _TYPES[array.dtype]) for array in (*inputs, *outputs)]

    def call(sources: Sequence[int], targets: Sequence[int]) -> None:
        addresses = [*sources, *targets]
        arrays = [view(address, *kind) for address, kind in zip(addresses, types, strict=True)]
        results = run(*arrays[: len(sources)])
        for target, result in zip(arrays[len(sources) :], results, strict=True):
            target[...] = result

    shapes, dtypes = [array.shape for array in outputs], [array.dtype for array in outputs]
    made: list[mx.array] = native.module.host_kernel(call, list(inputs), shapes, dtypes)
    return made


def view(address: int, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
    """Return the memory at an address as an array, which can be written to."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    return np.frombuffer(memory, np.uint8).view(dtype).reshape(shape)


@dataclass(frozen=True, eq=False)
class HostKernels:
    """`PoolKernels` in float32.

    watch: is called as a kernel runs, with its name.
    """

    native: Native
    watch: Callable[[str], None] = lambda _: None

    def why_not(self, shape: LayerShape) -> str:
        return "" if shape.dtype == mx.float32 else f"the kernels on the host take no {shape.dtype}"

    def write(
        self,
        rows: Sequence[mx.array],
        slots: mx.array,
        pool: KernelPool,
        token: mx.array,
    ) -> mx.array:
        inputs = [slots, token, *rows, *pool.arrays]
        [made] = self._run("write", self._writer(pool), inputs, [token])
        return made

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
        write = self._writer(pool)

        def run(
            queries: Array,
            keys: Array,
            values: Array,
            radians: Array,
            positions: Array,
            *rest: Array,
        ) -> Sequence[Array]:
            slots, token, key_pool, value_pool, *weights = rest
            if norms is not None:
                queries, keys = (
                    _normed(rows, weight, norms.eps)
                    for rows, weight in zip((queries, keys), weights, strict=True)
                )
            num_pairs = rotation.num_dims // 2
            angles = positions[: len(keys), None, None] * radians[:num_pairs].astype(np.float64)
            queries, keys = (_rotated(rows, angles, rotation) for rows in (queries, keys))
            return queries, *write(slots, token, keys, values, key_pool, value_pool)

        inputs = [queries, keys, values, rotation.radians, positions, slots, token, *pool.arrays]
        inputs += [] if norms is None else norms[:2]
        rotated, made = self._run("rotate and write", run, inputs, [queries, token])
        return rotated, made

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
        size = pool.block_size

        num_arrays = len(pool.arrays)

        def run(
            queries: Array, tables: Array, ranges: Array, token: Array, *rest: Array
        ) -> Sequence[Array]:
            arrays, its_sinks = rest[:num_arrays], rest[num_arrays:]
            outputs = np.empty((num_rows, num_heads, pool.value_dim), np.float32)
            for row, (query, (first, count)) in enumerate(zip(queries, ranges, strict=False)):
                at = np.arange(first, first + count)
                slots = tables[row, at // size].astype(np.int64) * size + at % size
                read = [_heads(array, pool)[:, slots] for array in arrays]
                keys, values = read[0], read[-1][..., : pool.value_dim]
                outputs[row] = _attend(query, keys, values, scale, soft_cap, its_sinks)
            return outputs, token

        inputs = [queries, *rows, token, *pool.arrays]
        inputs += [] if sinks is None else [sinks]
        output = mx.zeros((num_rows, num_heads, pool.value_dim))
        attended, made = self._run("decode", run, inputs, [output, token])
        return attended, made

    def _writer(self, pool: KernelPool) -> Run:
        def write(slots: Array, token: Array, *rest: Array) -> Sequence[Array]:
            rows, arrays = np.split(np.arange(len(rest)), 2)
            for of_rows, of_pool in zip(rows, arrays, strict=True):
                new = rest[of_rows]
                _heads(rest[of_pool], pool)[:, slots[: len(new)]] = new.swapaxes(0, 1)
            return [token]

        return write

    def _run(
        self, name: str, run: Run, inputs: Sequence[mx.array], outputs: Sequence[mx.array]
    ) -> list[mx.array]:
        def watched(*arrays: Array) -> Sequence[Array]:
            self.watch(name)
            return run(*arrays)

        return host_kernel(self.native, watched, inputs, outputs)


def _heads(array: Array, pool: KernelPool) -> Array:
    return array.reshape(pool.num_heads, pool.num_slots, -1)


def _normed(rows: Array, weight: Array, eps: float) -> Array:
    inverse: Array = 1 / np.sqrt((rows**2).mean(-1, keepdims=True) + eps)
    return rows * inverse * weight


def _rotated(rows: Array, angles: Array, rotation: Rotation) -> Array:
    num_pairs = angles.shape[-1]
    if rotation.is_traditional:
        first, second = slice(0, 2 * num_pairs, 2), slice(1, 2 * num_pairs, 2)
    else:
        first, second = slice(0, num_pairs), slice(num_pairs, 2 * num_pairs)
    cosines, sines = rotation.factor * np.cos(angles), rotation.factor * np.sin(angles)
    x, y = rows[..., first], rows[..., second]
    rotated = rows.copy()
    rotated[..., first], rotated[..., second] = x * cosines - y * sines, x * sines + y * cosines
    return rotated


def _attend(
    query: Array, keys: Array, values: Array, scale: float, soft_cap: float, sinks: Sequence[Array]
) -> Array:
    """Attend one row: `[num_query_heads, key_dim]` over `[num_heads, N, dim]`."""
    grouped = query.reshape(len(keys), -1, query.shape[-1])
    scores = (grouped @ keys.swapaxes(1, 2) * scale).reshape(len(query), -1)
    if soft_cap:
        scores = soft_cap * np.tanh(scores / soft_cap)
    if sinks:
        scores = np.concatenate([scores, sinks[0][: len(query), None]], axis=1)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights = (weights / weights.sum(axis=1, keepdims=True))[:, : keys.shape[1]]
    attended: Array = weights.reshape(len(keys), -1, keys.shape[1]) @ values
    return attended.reshape(len(query), -1)
