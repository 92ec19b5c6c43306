"""Quantized products of T rows of length 1, which are the shape of a ragged step, and of one matrix."""

from typing import Final

import mlx.core as mx
import numpy as np

from scripts.gpu_check.record import Options, Record

_GROUP: Final = 64
# Of the largest number of the product: MLX sums up in bfloat16 on a CPU, and a wrong product is off by 1.
_TOLERANCE: Final = 0.04


def run(options: Options, record: Record) -> None:
    """Compare both shapes with the product of the dequantized weights."""
    record.table("bits", "T", "error, [T, 1, K]", "error, [T, K]", "")
    inputs, outputs = (128, 256) if options.is_quick else (2560, 9728)
    weights = mx.random.normal((outputs, inputs), key=mx.random.key(1)).astype(mx.bfloat16)
    for bits in (4, 8):
        packed = mx.quantize(weights, _GROUP, bits)
        exact = mx.dequantize(*packed, group_size=_GROUP, bits=bits).astype(mx.float32)
        for num_rows in (1, 8) if options.is_quick else (1, 2, 4, 8, 16, 32, 64):
            rows = mx.random.normal((num_rows, inputs), key=mx.random.key(2)).astype(mx.bfloat16)
            expected = rows.astype(mx.float32) @ exact.T
            ragged, flat = (
                _error(multiply(x, packed, bits).reshape(num_rows, outputs), expected)
                for x in (rows[:, None], rows)
            )
            failure = f"{bits} bits, {num_rows} rows: off by {max(ragged, flat):.2g} of the largest"
            verdict = record.expect(max(ragged, flat) <= _TOLERANCE, failure)
            record.row(bits, num_rows, f"{ragged:.2g}", f"{flat:.2g}", verdict)
    record.note("Errors are relative to the largest number of the product.")


def multiply(rows: mx.array, packed: tuple[mx.array, ...], bits: int) -> mx.array:
    weights, scales, biases = packed
    return mx.quantized_matmul(
        rows, weights, scales, biases, transpose=True, group_size=_GROUP, bits=bits
    )


def _error(result: mx.array, expected: mx.array) -> float:
    difference = mx.max(mx.abs(result.astype(mx.float32) - expected)) / mx.max(mx.abs(expected))
    return float(np.array(difference))
