"""The interface between the pool and its kernels, wherever these run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import mlx.core as mx

from batching.backend.paged.layout import LayerShape

# The fewest elements of a kernel's input: Metal has another kernel for fewer.
MIN_ELEMENTS: Final = 8


class KernelPool(NamedTuple):
    """One layer: keys `[num_heads * num_slots, key_dim]`, values `[num_heads * num_slots, value_dim]`.

    A token's slot is `block_id * block_size + position % block_size`.
    arrays: keys and values; keys alone where values are their first numbers (latent attention).  Those of int8 are
        followed by scales of keys and of values, float32 `[num_heads * num_slots]`, by which rows are multiplied.
    """

    arrays: tuple[mx.array, ...]
    num_heads: int
    value_dim: int
    block_size: int

    @property
    def keys(self) -> mx.array:
        return self.arrays[0]

    @property
    def constants(self) -> tuple[object, ...]:
        """The constants that a kernel over this pool is compiled for, except the size of a block."""
        keys = self.arrays[0]
        return self.num_heads, keys.shape[1], self.value_dim, keys.dtype, len(self.arrays)

    @property
    def is_quantized(self) -> bool:
        return self.keys.dtype == mx.int8

    @property
    def num_slots(self) -> int:
        return len(self.keys) // self.num_heads


class DecodeRows(NamedTuple):
    """The keys that each of R rows attends to.

    tables: uint32 `[R, W]`, the blocks from that of the first key on; W is a power of two, at least 8.
    ranges: int32 `[max(R, 4), 2]`, the position of the first key within its block, and the number of keys.
    """

    tables: mx.array
    ranges: mx.array


@dataclass(frozen=True, eq=False)
class Rotation:
    """A rotary embedding of the first `num_dims` numbers of a head (Su et al. 2021).

    radians: float32 `[max(num_dims / 2, 8)]`, by which each pair turns from one position to the next.
    factor: what rotated numbers are multiplied by.
    is_traditional: the numbers of a pair are neighbours; otherwise they are half the numbers apart.
    """

    radians: mx.array
    num_dims: int
    factor: float
    is_traditional: bool


class HeadNorms(NamedTuple):
    """RMSNorm of each head before its rotation; weights are `[key_dim]`."""

    query_weight: mx.array
    key_weight: mx.array
    eps: float


class PoolKernels(Protocol):
    """Kernels that write to the pool in place, of which MLX does not know.

    They are ordered by a token, uint32 `[8]`, all 0: each kernel gets the token of the previous one and
    returns another.  It is an input and an output of the kernels themselves, because the barriers of a GPU
    follow what kernels read and write, not the graph.

    queries: `[T, num_query_heads, key_dim]`.
    keys, values: `[T, num_heads, dim]`.
    slots: uint32 `[max(T, 8)]`.
    positions: int32 `[max(T, 8)]`.
    sinks: float32 `[max(num_query_heads, 8)]`.
    """

    def why_not(self, shape: LayerShape) -> str:
        """Return why the kernels do not support this layer; empty if they do."""
        ...

    def write(
        self,
        rows: Sequence[mx.array],
        slots: mx.array,
        pool: KernelPool,
        token: mx.array,
    ) -> mx.array:
        """Write keys, and values unless they are in the keys, into their slots; return the token.

        A pool of int8 rounds them.  Rows of int8 are what such a pool has: they are followed by their scales,
        float32 `[T, num_heads, 1]`, and copied bit by bit.
        """
        ...

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
        """Write as `write` does, after norms and rotation; return the rotated queries and the token.

        No pool of int8 is written so.
        """
        ...

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
        """Attend each row, `[R, num_query_heads, value_dim]`; return that and the token."""
        ...
