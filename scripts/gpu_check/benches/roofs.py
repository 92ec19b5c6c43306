"""What this machine reaches: bytes moved by a copy, and operations of a large product."""

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Final

import mlx.core as mx

from batching.backend.memory.device import device_memory
from scripts.gpu_check.record import Options, Record

_NUM_SAMPLES: Final = 7


def run(options: Options, record: Record) -> None:
    record.table("what", "measured", "size")
    most = 1 << (22 if options.is_quick else 30)
    num_bytes = min(most, device_memory() // 16)
    array = mx.zeros((num_bytes // 4,), mx.float32)
    mx.eval(array)
    # Each number is read and written.
    bandwidth = 2 * array.nbytes / _best(lambda: array + 1)
    record.values["bandwidth"] = bandwidth
    record.row(
        "memory, read and written", f"{bandwidth / 1e9:.0f} GB/s", f"{array.nbytes >> 20} MiB"
    )
    size = 256 if options.is_quick else 8192
    for dtype in (mx.bfloat16, mx.float32):
        left, right = (mx.random.normal((size, size)).astype(dtype) for _ in range(2))
        mx.eval(left, right)
        flops = 2 * size**3 / _best(partial(mx.matmul, left, right))
        name = str(dtype).removeprefix("mlx.core.")
        record.values[f"flops {name}"] = flops
        record.row(f"products in {name}", f"{flops / 1e12:.2f} TFLOP/s", f"{size} x {size}")
    record.note(
        "The best of several. Shares of the roof below divide the least time that bytes and operations take "
        "at these rates by the time that was measured."
    )


def _best(compute: Callable[[], mx.array]) -> float:
    times: list[float] = []
    for _ in range(_NUM_SAMPLES):
        began = perf_counter()
        mx.eval(compute())
        times.append(perf_counter() - began)
    return min(times)
