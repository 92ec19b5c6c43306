"""Adapters of the native kernels, and what to compare their products with."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]
Change = tuple[mx.array, mx.array]


@contextmanager
def adapted(kernels: Any, segments: Sequence[tuple[int, Any]]) -> Iterator[None]:
    """Have operations built with the adapters of some rows."""
    before = kernels.use_adapters(kernels.adapted_rows(segments))
    try:
        yield
    finally:
        kernels.use_adapters(before)


def random(rng: np.random.Generator, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)


def double(x: mx.array) -> Doubles:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def change(
    rng: np.random.Generator, weight: mx.array, rank: int, dtype: mx.Dtype = mx.float32
) -> Change:
    outputs, inputs = weight.shape
    a = random(rng, inputs, rank, dtype=dtype) * mx.array(inputs**-0.5, dtype)
    return a, random(rng, rank, outputs, dtype=dtype) * mx.array(0.5, dtype)


def is_close(actual: mx.array, expected: Doubles, tolerance: float = 3e-6) -> None:
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(double(actual), expected, rtol=0, atol=tolerance * scale)
