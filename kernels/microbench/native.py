"""The native kernels, each beside the roofline of this machine."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import mlx.core as mx

from batching.backend.platforms.cpu.native_loader import Native, NoNative, load_native
from batching.errors import ModelLoadError
from kernels.microbench.native_attention import BUNDLED, FilledPool, long_contexts
from kernels.microbench.roofline import Case, Roofline, measure_roofline
from scripts.microbench.timing import QUICK, Pace, Result, Timing, compare

# A layer of the bundled model: inputs, and the outputs of gate and up.
_SIZE: Final = 576
_WIDTH: Final = 1536
_NUM_ROWS: Final = (1, 4, 16, 64, 512)
# Copies of the weights, read in turns: more than the caches hold.
_MEMORY: Final = 64 << 20


def run_native(pace: Pace) -> Result:
    """Time products and attention, in the bundled model's shapes, and long contexts in others.

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
        for name, bits, options in _formats(native)
        for num_rows in rows
    }
    cases |= {
        f"attention, {bits} bits, {num_rows} rows x {context}": FilledPool(
            kernels, BUNDLED, bits, False, num_rows * context
        ).case(num_rows, 1, context)
        for bits in (32, 16, 8)
        for num_rows, context in _contexts(pace)
    }
    timings = _time(cases, roofline, pace)
    for longer in long_contexts(kernels, pace):
        timings += _time(longer, roofline, pace)
    return Result(timings)


def _time(cases: Mapping[str, Case], roofline: Roofline, pace: Pace) -> list[Timing]:
    return [
        replace(timing, note=_rates(timing.seconds, cases[timing.name], roofline))
        for timing in compare({name: case.run for name, case in cases.items()}, pace)
    ]


def _formats(native: Native) -> list[tuple[str, int, dict[str, int]]]:
    formats: list[tuple[str, int, dict[str, int]]] = [
        ("float32", 0, {}),
        ("8 bits", 8, {}),
        ("4 bits", 4, {}),
    ]
    if native.min_input_bits <= 16:
        formats += [("4 bits, inputs of 16", 4, {"input_bits": 16})]
    if native.min_input_bits == 8:
        formats += [("4 bits, inputs of 8, scaled", 4, {"input_bits": 16, "max_shift": 2})]
    return formats


def _contexts(pace: Pace) -> list[tuple[int, int]]:
    return [(1, 128)] if pace == QUICK else [(1, 128), (16, 128), (16, 1024), (1, 4096)]


def _product(
    kernels: Any,
    num_rows: int,
    bits: int,
    *,
    max_shift: int = 0,
    **options: int,
) -> Case:
    weight = mx.random.normal((2 * _WIDTH, _SIZE))
    # Scales of 16 bits, as models have them.
    parts = mx.quantize(weight.astype(mx.float16), group_size=32, bits=bits) if bits else (weight,)
    pack = partial(kernels.pack, *parts, bits, **options) if bits else partial(kernels.pack, weight)
    first = pack()
    packed = [first, *(pack() for _ in range(_MEMORY // first.nbytes))]
    if max_shift:
        kernels.scale_inputs(packed, bytes(i % (max_shift + 1) for i in range(_SIZE)))
    x = mx.random.normal((num_rows, _SIZE))
    mx.eval(x)

    def run() -> None:
        mx.eval([kernels.linear(x, [each], [None]) for each in packed])

    times = len(packed)
    return Case(run, 2.0 * num_rows * weight.size * times, float(first.nbytes * times))


def _rates(seconds: float, case: Case, roofline: Roofline) -> str:
    """Return both rates, and the share of the roof: of what limits more."""
    flops, num_bytes = case.num_flops / seconds, case.num_bytes / seconds
    most = roofline.flops(case.bits)
    share = max(flops / most, num_bytes / roofline.bytes_read)
    return (
        f"{flops / 1e9:.0f} of {most / 1e9:.0f} GFLOP/s, "
        f"{num_bytes / 1e9:.0f} of {roofline.bytes_read / 1e9:.0f} GB/s: {share:.0%}"
    )
