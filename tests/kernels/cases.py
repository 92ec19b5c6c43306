"""Inputs of the kernels, and what they must compute, in float64."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from batching.backend.platforms.gpu.kernels.definitions import MergeSplits, PagedDecode, PoolShape
from batching.backend.platforms.gpu.kernels.sources import DType, KernelSource, Launch, Target
from tests.kernels.cpu_target import NUMPY_DTYPES, Array, CPUKernel

# (first visible position, how many): one key, edges of blocks and of splits, windows, and padding.
RANGES: Final = (
    *((0, 1), (0, 15), (0, 16), (0, 17), (0, 511), (0, 512), (0, 513)),
    *((5, 1), (30, 512), (1000, 100), (3, 1030), (0, 0)),
)


class Kernel(Protocol):
    def source(self, target: Target) -> KernelSource: ...


def stored(values: Array, dtype: DType) -> Array:
    """Return numbers as a kernel's buffer has them: bfloat16, which numpy does not know, as uint16."""
    if dtype is not DType.BFLOAT16:
        return values.astype(NUMPY_DTYPES[dtype])
    bits = values.astype(np.float32).view(np.uint32)
    # To the nearest, to even in the middle.
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def numbers(buffer: Array, dtype: DType) -> Array:
    """Return the float64 numbers of a buffer."""
    if dtype is DType.BFLOAT16:
        buffer = (buffer.astype(np.uint32) << 16).view(np.float32)
    return buffer.astype(np.float64)


def quantized(rows: Array) -> tuple[Array, Array]:
    """Return rows as integers, and their scales in float32; a row with a NaN has zeros and a NaN."""
    largest = np.abs(rows).max(-1)
    scales = (largest / 127).astype(np.float32)
    finite = np.isfinite(largest) & (largest > 0)
    factors = np.where(finite, 127 / np.where(finite, largest, 1), 0)
    return np.rint(np.nan_to_num(rows) * factors[:, None]).astype(np.int8), scales


def pad(values: Array, size: int = 8) -> Array:
    """Return values with zeros after them: fewer than eight would be in Metal's constant memory."""
    return np.concatenate([values, np.zeros(max(size - len(values), 0), values.dtype)])


def no_token() -> Array:
    return np.zeros(8, np.uint32)


def same_bits(first: Array, second: Array) -> bool:
    return first.tobytes() == second.tobytes()


@dataclass(frozen=True)
class DecodeCase:
    """expected: `[R, Hq, Dv]`."""

    kernel: PagedDecode
    inputs: list[Array]
    launch: Launch
    num_rows: int
    num_splits: int
    expected: Array

    def outputs(self) -> list[Array]:
        """Return partials and statistics; what a kernel does not write stays a NaN."""
        shape = (self.num_rows, self.kernel.num_heads, self.num_splits)
        return [
            np.full((*shape, dim), np.nan, np.float32) for dim in (self.kernel.pool.value_dim, 2)
        ]

    def merged(self, outputs: Sequence[Array]) -> Array:
        """Return the rows' results `[R, Hq, Dv]` in float32."""
        merge = MergeSplits(DType.FLOAT32, self.kernel.num_heads, self.kernel.pool.value_dim)
        out = np.full(self.expected.shape, np.nan, np.float32)
        CPUKernel(merge.source(Target.CPU))(
            [*outputs, no_token()], [out, no_token()], merge.launch(self.num_rows)
        )
        return out


def decode_case(
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    dtype: DType,
    *,
    value_dim: int | None = None,
    values_in_keys: bool = False,
    block_size: int = 16,
    soft_cap: float = 0.0,
    pool_dtype: DType | None = None,
    ranges: Sequence[tuple[int, int]] = RANGES,
    threads: int = 256,
) -> DecodeCase:
    """Return rows whose blocks are scattered in the pool, where all that no row may see is a NaN."""
    random = np.random.default_rng(dim * num_heads)
    num_blocks = [-(-sum(each) // block_size) for each in ranges]
    pool = PoolShape(num_kv_heads, dim, value_dim or dim, pool_dtype or dtype, values_in_keys)
    kernel = PagedDecode(pool, dtype, num_heads, block_size, dim**-0.5, soft_cap, threads=threads)
    tables, slots = _scattered(random, ranges, num_blocks, block_size)
    num_slots = (sum(num_blocks) + 3) * block_size
    arrays, buffers = _filled(random, pool, num_slots, np.concatenate(slots))
    # Scores up to 10, so that softmax and soft caps do something.
    queries = stored(3 * random.standard_normal((len(ranges), num_heads, dim)), dtype)
    num_splits = kernel.num_splits(max(count for _, count in ranges))
    return DecodeCase(
        kernel,
        [queries, *buffers, tables, _padded_ranges(ranges), no_token()],
        kernel.launch(len(ranges), num_splits),
        len(ranges),
        num_splits,
        _attention(kernel, queries, arrays, slots),
    )


def _scattered(
    random: np.random.Generator,
    ranges: Sequence[tuple[int, int]],
    num_blocks: Sequence[int],
    block_size: int,
) -> tuple[Array, list[Array]]:
    """Return tables of blocks that lie anywhere, and the slots that each row may see."""
    blocks = random.permutation(sum(num_blocks) + 3).astype(np.uint32)
    tables = np.full((len(ranges), max(*num_blocks, 8)), 0xFFFFFFFF, np.uint32)
    slots = []
    for row, (first, count) in enumerate(ranges):
        own, blocks = np.split(blocks, [num_blocks[row]])
        tables[row, : len(own)] = own
        positions = np.arange(first, first + count)
        slots.append(own[positions // block_size] * block_size + positions % block_size)
    return tables, slots


def _filled(
    random: np.random.Generator, pool: PoolShape, num_slots: int, visible: Array
) -> tuple[list[Array], list[Array]]:
    """Return a pool's numbers in float64, and its buffers; all that is not visible is a NaN."""
    arrays = []
    for size in (pool.key_dim, pool.value_dim)[: len(pool.arrays)]:
        array = np.full((pool.num_kv_heads, num_slots, size), np.nan)
        array[:, visible] = random.standard_normal((pool.num_kv_heads, len(visible), size))
        arrays.append(array.reshape(-1, size))
    if not pool.is_quantized:
        buffers = [stored(array, pool.dtype) for array in arrays]
        return [numbers(buffer, pool.dtype) for buffer in buffers], buffers
    rounded = [quantized(array) for array in arrays]
    buffers = [*(integers for integers, _ in rounded), *(scales for _, scales in rounded)]
    return [integers * scales[:, None].astype(np.float64) for integers, scales in rounded], buffers


def _padded_ranges(ranges: Sequence[tuple[int, int]]) -> Array:
    padding = [(0, 0)] * max(4 - len(ranges), 0)
    return np.array([*ranges, *padding], np.int32)


def _attention(
    kernel: PagedDecode, queries: Array, pools: Sequence[Array], slots: Sequence[Array]
) -> Array:
    pool, (num_rows, num_heads, _) = kernel.pool, queries.shape
    by_head = [array.reshape(pool.num_kv_heads, -1, array.shape[-1]) for array in pools]
    keys, values = by_head[0], by_head[-1][..., : pool.value_dim]
    shared = num_heads // pool.num_kv_heads
    result = np.zeros((num_rows, num_heads, pool.value_dim))
    for row, own in enumerate(slots):
        for head in range(num_heads if len(own) else 0):
            query = numbers(queries[row, head], kernel.dtype)
            scores = keys[head // shared, own] @ query * kernel.scale
            if kernel.soft_cap:
                scores = kernel.soft_cap * np.tanh(scores / kernel.soft_cap)
            weights = np.exp(scores - scores.max())
            result[row, head] = weights @ values[head // shared, own] / weights.sum()
    return result
