"""The same model in mlx-lm's own generators, with mlx-lm's own code only."""

from time import perf_counter
from typing import Final

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, generate_step

from scripts.gpu_check.benches.shape import Cost, Point, bytes_for_pool, kv_bytes, load
from scripts.gpu_check.record import Options, Record, Roofs, Skipped
from scripts.gpu_check.serving import prompt

_POINTS: Final = (Point(1, 128), Point(1, 2048), Point(32, 128), Point(32, 2048))
_QUICK_POINTS: Final = (Point(1, 20), Point(4, 20))
_NUM_TOKENS: Final = 64
_GIB: Final = 1 << 30
# What a point takes at most once it has begun: a batch whose prompts are read.
_LEAST_LEFT: Final = 5.0


def run_4bit(options: Options, record: Record) -> None:
    run(options, record, 4)


def run_bf16(options: Options, record: Record) -> None:
    run(options, record, None)


def run(options: Options, record: Record, bits: int | None) -> None:
    record.table(
        *("requests x context", "prompt tokens/s", "tokens/s", "peak, GiB", "share of the roof")
    )
    if "bandwidth" not in options.roofs or "flops bfloat16" not in options.roofs:
        raise Skipped("the roofs are not measured: with --only, add --only roofs")
    chosen, model, cost = load(options, bits)
    num_tokens = 4 if options.is_quick else _NUM_TOKENS
    slowest = 0.0
    for point in _QUICK_POINTS if options.is_quick else _POINTS:
        size = point.rows * (point.context + num_tokens) * kv_bytes(chosen)
        # It keeps keys and values twice while a batch grows.
        if 2 * size > bytes_for_pool(chosen, bits):
            needed = (cost.weight_bytes + 2 * size) / _GIB
            record.row(str(point), f"skipped: needs {needed:.0f} GiB", "", "", "")
            continue
        if record.seconds_left < _LEAST_LEFT + point.rows * point.context * slowest:
            record.row(str(point), "skipped, no time left", "", "", "")
            continue
        measure = _one if point.rows == 1 else _batch
        measure(model, Point(point.rows, min(point.context, 64)), 3)
        mx.reset_peak_memory()
        prefill, decode = measure(model, point, num_tokens)
        slowest = prefill / (point.rows * point.context)
        record.row(str(point), *_cells(point, prefill, decode, cost, options.roofs))
    record.note("`generate_step` for one request and `BatchGenerator` for several, in-process.")


def _cells(
    point: Point, prefill: float, decode: float, cost: Cost, roofs: Roofs
) -> tuple[str, str, str, str]:
    """`prefill` is in seconds, `decode` in seconds a step."""
    return (
        f"{point.rows * point.context / prefill:.0f}",
        f"{point.rows / decode:.1f}",
        f"{mx.get_peak_memory() / _GIB:.2f}",
        f"{100 * cost.decode_seconds(point, roofs) / decode:.0f} %",
    )


def _one(model: nn.Module, point: Point, num_tokens: int) -> tuple[float, float]:
    began = perf_counter()
    first = 0.0
    tokens = mx.array(prompt(0, point.context, 100))
    for _ in generate_step(tokens, model, max_tokens=num_tokens):
        first = first or perf_counter()
    return first - began, (perf_counter() - first) / (num_tokens - 1)


def _batch(model: nn.Module, point: Point, num_tokens: int) -> tuple[float, float]:
    generator = BatchGenerator(model, max_tokens=num_tokens, completion_batch_size=point.rows)
    try:
        began = perf_counter()
        generator.insert([prompt(row, point.context, 100) for row in range(point.rows)])
        # From when all of them decode: until then some wait for the prompts of others.
        started: float | None = None
        num_steps = 0
        while responses := generator.next_generated():
            if started is not None:
                num_steps += len(responses) == point.rows
            elif len(responses) == point.rows:
                started = perf_counter()
            ended = perf_counter()
            if any(response.finish_reason for response in responses):
                break
        assert started is not None, "the rows of a batch decode together"
        return started - began, (ended - started) / max(1, num_steps)
    finally:
        generator.close()
