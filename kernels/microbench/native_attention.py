"""Attention of the native kernels: decodes, and chunks of prompts behind long contexts."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import mlx.core as mx
import numpy as np

from kernels.microbench.roofline import Case
from scripts.microbench.timing import QUICK, Pace

_BLOCK_SIZE: Final = 32
# As bytes of numbers of any type and of their scales: a small number, and not zero, since pages that are
# never written are all the same one.
_FILLING: Final = 0x3C
_SCALE_BYTES: Final = 4


class Shape(NamedTuple):
    name: str
    num_heads: int  # of keys
    group: int  # query heads of each
    dim: int


BUNDLED: Final = Shape("SmolLM2-135M", 3, 3, 64)
_SHAPES: Final = (Shape("Qwen3-1.7B", 8, 2, 128), Shape("Llama-3.2-3B", 8, 3, 128), BUNDLED)
# Bits of the pool, and whether queries and weights are rounded to 16 bits.
_POOLS: Final = ((32, False), (16, False), (16, True), (8, False), (8, True))
_CHUNK: Final = 256
_NUM_DECODES: Final = 8
_CHUNK_CONTEXTS: Final = (4096, 16384, 32768)
_DECODE_CONTEXTS: Final = (4096, 16384)


@dataclass(frozen=True)
class FilledPool:
    """A pool of one layer for some tokens, all written."""

    kernels: Any
    shape: Shape
    bits: int
    rounds_inputs: bool
    num_tokens: int

    def __post_init__(self) -> None:
        _, num_heads, _, dim = self.shape
        pool = self.kernels.pool(
            self.num_tokens // _BLOCK_SIZE,
            _BLOCK_SIZE,
            num_heads,
            dim,
            dim,
            self.bits,
            self.rounds_inputs,
        )
        for address, size in pool.regions:
            ctypes.memset(address, _FILLING, size)
        object.__setattr__(self, "pool", pool)

    def case(self, num_requests: int, num_rows: int, context: int) -> Case:
        """Return the attention of the last `num_rows` tokens of requests with a context each."""
        _, num_heads, group, dim = self.shape
        num_blocks = context // _BLOCK_SIZE
        blocks = np.random.default_rng(1).permutation(num_requests * num_blocks).astype(np.int32)
        first = context - num_rows
        slices = [(i * num_rows, num_rows, first, i * num_blocks, 0) for i in range(num_requests)]
        positions = np.arange(first, context)
        tables = blocks.reshape(num_requests, num_blocks)[:, positions // _BLOCK_SIZE]
        slots = (tables * _BLOCK_SIZE + positions % _BLOCK_SIZE).astype(np.int32).reshape(-1)
        step = self.kernels.step(np.array(slices, np.int32), blocks, slots)
        queries = mx.random.normal((len(slots), num_heads * group, 1, dim))
        new = mx.random.normal((len(slots), num_heads, 1, dim))
        mx.eval(queries, new)
        pool: Any = vars(self)["pool"]

        def run() -> None:
            mx.eval(self.kernels.attend(queries, new, new, pool, step, dim**-0.5))

        seen = len(slots) * (context - (num_rows - 1) / 2) * num_heads
        stored = dim * self.bits // 8 + (_SCALE_BYTES if self.bits == 8 else 0)
        num_bytes = 2.0 * num_requests * context * num_heads * stored
        return Case(
            run, 4.0 * seen * group * dim, num_bytes, self.bits if self.rounds_inputs else 32
        )


def long_contexts(kernels: Any, pace: Pace) -> Iterator[dict[str, Case]]:
    """Yield cases that share a pool, so that there is only one pool at a time."""
    chunks = _CHUNK_CONTEXTS[:1] if pace == QUICK else _CHUNK_CONTEXTS
    decodes = _DECODE_CONTEXTS[:1] if pace == QUICK else _DECODE_CONTEXTS
    num_tokens = max(*chunks, _NUM_DECODES * max(decodes))
    for shape in _SHAPES[-1:] if pace == QUICK else _SHAPES:
        for bits, rounds_inputs in _POOLS:
            pool = FilledPool(kernels, shape, bits, rounds_inputs, num_tokens)
            title = f"{shape.name}, {bits} bits{', rounded' if rounds_inputs else ''}"
            cases = {f"{title}, {_CHUNK} rows at {n}": pool.case(1, _CHUNK, n) for n in chunks}
            cases |= {
                f"{title}, {_NUM_DECODES} decodes at {n}": pool.case(_NUM_DECODES, 1, n)
                for n in decodes
            }
            yield cases
