"""MLX's attention over views of a larger array, as the KV pool hands them over."""

import math
from typing import Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from batching.backend.devices import Gpu, default_gpu
from scripts.gpu_check.record import Options, Record

_NUM_HEADS, _NUM_KV_HEADS = 8, 2
_CHUNK: Final = 16
# Of numbers that a softmax over hundreds of keys averages, some 0.1 each; wrong memory is off by as much.
_TOLERANCE: Final = {mx.float16: 0.003, mx.bfloat16: 0.02, mx.float32: 0.003}
_VIEW_IS_WRONG: Final = (
    "This MLX reads other memory than it is given where one query without a mask attends to a view "
    "that begins inside an array (`unslice_kv` in its CUDA backend). The server gathers decodes on CUDA, "
    "so it is not affected."
)

Floats = NDArray[np.float64]


def run(options: Options, record: Record) -> None:
    """Compare views at the beginning of a pool and inside, and what is gathered, with float64."""
    record.table(
        *("type", "head dim", "keys", "queries", "view at", "error, view", "error, gathered", "")
    )
    sizes = (256,) if options.is_quick else (256, 512, 768, 1024)
    num_slots = 2 * max(sizes)
    for dtype in (mx.float16, mx.bfloat16):
        for dim in (64,) if options.is_quick else (64, 128):
            keys, values = (_random((1, _NUM_KV_HEADS, num_slots, dim), dtype, i) for i in (1, 2))
            for num_keys in sizes:
                for num_queries in (1, _CHUNK):
                    for base in (0, 32, 256):
                        run_ = slice(base, base + num_keys)
                        _compare(record, keys, values, run_, num_queries)


def _compare(
    record: Record, keys: mx.array, values: mx.array, where: slice, num_queries: int
) -> None:
    dim, num_keys = keys.shape[-1], where.stop - where.start
    queries = _random((1, _NUM_HEADS, num_queries, dim), keys.dtype, 3)
    views = keys[:, :, where], values[:, :, where]
    slots = mx.arange(where.start, where.stop)
    gathered = keys[:, :, slots], values[:, :, slots]
    expected = reference(queries, *gathered)
    of_view, of_gathered = (_error(attend(queries, *pair), expected) for pair in (views, gathered))
    tolerance = _TOLERANCE[keys.dtype]
    name = f"{_name(keys.dtype)}, {dim}, {num_keys} keys, {num_queries} queries"
    is_known = num_queries == 1 and default_gpu() is Gpu.CUDA and not of_view <= tolerance
    if is_known:
        record.note(_VIEW_IS_WRONG)
    failure = f"{name}: {{}} at {where.start} is off by {{:.3g}}"
    verdict = record.expect(
        of_gathered <= tolerance and (is_known or of_view <= tolerance),
        failure.format("the gathered copy", of_gathered)
        if of_view <= tolerance
        else failure.format("the view", of_view),
    )
    verdict = "known defect" if is_known and verdict == "pass" else verdict
    record.row(
        *(_name(keys.dtype), dim, num_keys, num_queries, where.start),
        *(f"{of_view:.2g}", f"{of_gathered:.2g}", verdict),
    )


def attend(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """Return what MLX computes: one query sees all keys, several are the last ones of a causal chunk."""
    mask = None if queries.shape[2] == 1 else "causal"
    scale = 1 / math.sqrt(queries.shape[-1])
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


def reference(queries: mx.array, keys: mx.array, values: mx.array) -> Floats:
    """Return the same in float64."""
    q, k, v = (np.array(a.astype(mx.float32), np.float64)[0] for a in (queries, keys, values))
    k, v = (np.repeat(a, len(q) // len(a), axis=0) for a in (k, v))
    scores = q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1])
    num_queries, num_keys = scores.shape[1:]
    hidden = np.arange(num_keys) > np.arange(num_keys - num_queries, num_keys)[:, None]
    scores[:, hidden] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    result: Floats = (weights / weights.sum(-1, keepdims=True)) @ v
    return result


def _error(result: mx.array, expected: Floats) -> float:
    return float(np.max(np.abs(np.array(result.astype(mx.float32))[0] - expected)))


def _random(shape: tuple[int, ...], dtype: mx.Dtype, seed: int) -> mx.array:
    values = mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)
    mx.eval(values)
    return values


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
