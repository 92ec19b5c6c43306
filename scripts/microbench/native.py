"""The native kernels, each beside the roofline of this machine."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import mlx.core as mx
import numpy as np

from batching.backend.native_loader import NoNative, load_native
from batching.errors import ModelLoadError
from scripts.microbench.roofline import Roofline, measure_roofline
from scripts.microbench.timing import QUICK, Pace, Result, compare

# A layer of the bundled model: inputs, and the outputs of gate and up.
_SIZE: Final = 576
_WIDTH: Final = 1536
_HEADS: Final = (3, 3, 64)  # key heads, query heads of each, dimensions
_BLOCK_SIZE: Final = 32
_NUM_ROWS: Final = (1, 4, 16, 64, 512)
# Copies of the weights, read in turns: more than the caches hold.
_MEMORY: Final = 64 << 20


class Case(NamedTuple):
    """What is computed, in floating-point operations and in bytes of memory read."""

    run: Callable[[], object]
    num_flops: float
    num_bytes: float


def run_native(pace: Pace) -> Result:
    """Time products and attention, in the bundled model's shapes.

    Raises:
        ModelLoadError: the kernels, or a compiler for the roofline, are not there.
    """
    native = load_native("auto")
    if isinstance(native, NoNative):
        raise ModelLoadError(f"no native kernels: {native.reason}")
    kernels = native.module
    roofline = measure_roofline(native.num_threads)
    rows = _NUM_ROWS[:2] if pace == QUICK else _NUM_ROWS
    cases = {
        f"{name}, {num_rows} rows": _product(kernels, num_rows, bits, **options)
        for name, bits, options in _formats(native.supports_int_inputs)
        for num_rows in rows
    }
    cases |= {
        f"attention, {bits} bits, {num_rows} rows x {context}": _attention(
            kernels, num_rows, context, bits
        )
        for bits in (32, 16, 8)
        for num_rows, context in _contexts(pace)
    }
    timings = [
        replace(timing, note=_rates(timing.seconds, cases[timing.name], roofline))
        for timing in compare({name: case.run for name, case in cases.items()}, pace)
    ]
    return Result(timings)


def _formats(supports_int_inputs: bool) -> list[tuple[str, int, dict[str, int]]]:
    formats: list[tuple[str, int, dict[str, int]]] = [
        ("float32", 0, {}),
        ("8 bits", 8, {}),
        ("4 bits", 4, {}),
    ]
    if supports_int_inputs:
        formats += [(f"4 bits, inputs of {bits}", 4, {"input_bits": bits}) for bits in (16, 8)]
    return formats


def _contexts(pace: Pace) -> list[tuple[int, int]]:
    return [(1, 128)] if pace == QUICK else [(1, 128), (16, 128), (16, 1024), (1, 4096)]


def _product(kernels: Any, num_rows: int, bits: int, **options: int) -> Case:
    weight = mx.random.normal((2 * _WIDTH, _SIZE))
    # Scales of 16 bits, as models have them.
    parts = mx.quantize(weight.astype(mx.float16), group_size=32, bits=bits) if bits else (weight,)
    pack = partial(kernels.pack, *parts, bits, **options) if bits else partial(kernels.pack, weight)
    first = pack()
    packed = [first, *(pack() for _ in range(_MEMORY // first.nbytes))]
    x = mx.random.normal((num_rows, _SIZE))
    mx.eval(x)

    def run() -> None:
        mx.eval([kernels.linear(x, [each], [None]) for each in packed])

    times = len(packed)
    return Case(run, 2.0 * num_rows * weight.size * times, float(first.nbytes * times))


def _attention(kernels: Any, num_rows: int, context: int, bits: int) -> Case:
    """Decodes of as many requests, each with a context of its own."""
    num_heads, group, dim = _HEADS
    num_blocks = context // _BLOCK_SIZE
    pool = kernels.pool(num_rows * num_blocks, _BLOCK_SIZE, num_heads, dim, dim, bits)
    blocks = np.random.default_rng(1).permutation(num_rows * num_blocks).astype(np.int32)
    slices = [(row, 1, context - 1, row * num_blocks) for row in range(num_rows)]
    slots = blocks[num_blocks - 1 :: num_blocks] * _BLOCK_SIZE + _BLOCK_SIZE - 1
    step = kernels.step(np.array(slices, np.int32), blocks, slots.astype(np.int32))
    queries = mx.random.normal((num_rows, num_heads * group, 1, dim))
    new = mx.random.normal((num_rows, num_heads, 1, dim))
    mx.eval(queries, new)

    def run() -> None:
        mx.eval(kernels.attend(queries, new, new, pool, step, dim**-0.5))

    keys = num_rows * context * num_heads
    num_bytes = dim * bits // 8 + (4 if bits == 8 else 0)
    return Case(run, 4.0 * keys * group * dim, 2.0 * keys * num_bytes)


def _rates(seconds: float, case: Case, roofline: Roofline) -> str:
    rates = (case.num_flops / seconds, case.num_bytes / seconds)
    bounded = zip(rates, roofline, ("GFLOP/s", "GB/s"), strict=True)
    return ", ".join(f"{rate / 1e9:.0f} of {most / 1e9:.0f} {unit}" for rate, most, unit in bounded)
