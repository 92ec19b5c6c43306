"""The native kernels compute what numpy computes, and a row's bits depend on no other row."""

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from batching.backend.paged.layout import LayerShape
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.platforms.cpu.pools.cache import native_cache
from batching.block_manager import BlockCopy

Floats = npt.NDArray[np.float32]

EXAMPLES: Final = settings(
    max_examples=20 if "NATIVE_ISA" in os.environ else 60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
# Of the largest number: sums of up to a few hundred products in float32.
TOLERANCE: Final = 3e-6


@pytest.fixture
def kernels(native: Native) -> Any:
    return native.module


@dataclass
class Weights:
    """Packed weights, and what they are in float64."""

    packed: Any
    plain: npt.NDArray[np.float64]


def quantized(
    kernels: Any, rng: np.random.Generator, shape: tuple[int, int], group: int, bits: int
) -> Weights:
    weight = mx.array(rng.standard_normal(shape).astype(np.float32))
    parts = mx.quantize(weight, group_size=group, bits=bits)
    plain = mx.dequantize(*parts, group_size=group, bits=bits)
    return Weights(kernels.pack(*parts, bits), np.array(plain).astype(np.float64))


def floats(
    kernels: Any, rng: np.random.Generator, shape: tuple[int, int], dtype: mx.Dtype
) -> Weights:
    weight = mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)
    return Weights(kernels.pack(weight), np.array(weight.astype(mx.float32)).astype(np.float64))


def check(actual: mx.array, expected: npt.NDArray[Any], tolerance: float = TOLERANCE) -> None:
    assert actual.dtype == mx.float32
    assert actual.shape == expected.shape
    scale = max(1.0, float(np.abs(expected).max(initial=0)))
    np.testing.assert_allclose(np.array(actual), expected, rtol=0, atol=tolerance * scale)


NUM_ROWS: Final = st.one_of(st.integers(1, 20), st.sampled_from([95, 96, 97, 200]))
QUANTIZED_PRODUCTS: Final = given(
    rows=NUM_ROWS,
    outputs=st.integers(1, 200),
    groups=st.integers(1, 6),
    group=st.sampled_from([32, 64, 128]),
    bits=st.sampled_from([4, 8]),
    seed=st.integers(0, 1000),
)


@EXAMPLES
@QUANTIZED_PRODUCTS
def test_products_with_quantized_weights(
    kernels: Any, rows: int, outputs: int, groups: int, group: int, bits: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    weights = quantized(kernels, rng, (outputs, groups * group), group, bits)
    x = rng.standard_normal((rows, 1, groups * group)).astype(np.float32)
    bias = rng.standard_normal(outputs).astype(np.float32)
    (y,) = kernels.linear(mx.array(x), [weights.packed], [mx.array(bias)])
    check(y, x @ weights.plain.T + bias, 1e-5)


@EXAMPLES
@QUANTIZED_PRODUCTS
def test_products_with_integer_inputs(
    kernels: Any,
    rows: int,
    outputs: int,
    groups: int,
    group: int,
    bits: int,
    seed: int,
) -> None:
    """The error is at most that of rounding the inputs, half a step of each group."""
    if kernels.min_input_bits() > 16:
        pytest.skip("this processor has no products of integers")
    rng = np.random.default_rng(seed)
    weight = mx.array(rng.standard_normal((outputs, groups * group)).astype(np.float32))
    parts = mx.quantize(weight, group_size=group, bits=bits)
    plain = np.array(mx.dequantize(*parts, group_size=group, bits=bits)).astype(np.float64)
    packed = kernels.pack(*parts, bits, input_bits=16)
    x = rng.standard_normal((rows, groups, group)).astype(np.float32)
    x *= 10.0 ** rng.integers(-6, 6, (rows, groups, 1))
    x[0, 0] = 0
    (y,) = kernels.linear(mx.array(x.reshape(rows, -1)), [packed], [None])
    step = np.abs(x).max(axis=-1, keepdims=True) / (2**15 - 1)
    most = (np.broadcast_to(step / 2, x.shape).reshape(rows, -1)) @ np.abs(plain).T
    exact = x.reshape(rows, -1) @ plain.T
    scale = np.abs(x.reshape(rows, -1)) @ np.abs(plain).T
    assert np.all(np.abs(np.array(y) - exact) <= most * 1.01 + 2e-6 * scale)
    (alone,) = kernels.linear(mx.array(x[-1:].reshape(1, -1)), [packed], [None])
    assert mx.array_equal(alone, y[-1:])
    tokens = mx.array(rng.integers(0, outputs, (5, 1)))
    exactly = kernels.pack(*parts, bits)
    assert mx.array_equal(kernels.embed(tokens, packed), kernels.embed(tokens, exactly))


@EXAMPLES
@given(
    rows=NUM_ROWS,
    outputs=st.integers(1, 200),
    groups=st.integers(1, 6),
    mode=st.sampled_from(["affine", "mxfp4"]),
    seed=st.integers(0, 1000),
)
def test_products_with_inputs_scaled_by_channel(
    kernels: Any, rows: int, outputs: int, groups: int, mode: str, seed: int
) -> None:
    """The error is at most that of rounding what inputs are divided by, times as much."""
    if kernels.min_input_bits() > 8:
        pytest.skip("this processor has no VNNI")
    rng = np.random.default_rng(seed)
    size = 32 * groups
    weight = mx.array(rng.standard_normal((outputs, size)).astype(np.float32))
    parts = mx.quantize(weight, group_size=32, bits=4, mode=mode)
    dequantized = mx.dequantize(*parts, group_size=32, bits=4, mode=mode).astype(mx.float32)
    plain = np.array(dequantized).astype(np.float64)
    biases = None if mode == "mxfp4" else parts[2]
    unscaled, scaled = (kernels.pack(*parts[:2], biases, 4, input_bits=16) for _ in range(2))
    shifts = rng.integers(0, 4, size, np.uint8)
    kernels.scale_inputs([scaled], shifts.tobytes())
    x = rng.standard_normal((rows, size)).astype(np.float32) * 2.0**shifts
    (y,) = kernels.linear(mx.array(x, mx.float32), [scaled], [None])
    largest = np.abs((x / 2.0**shifts).reshape(rows, -1, 16)).max(axis=-1, keepdims=True)
    steps = np.repeat(largest / 127, 16, axis=-1).reshape(rows, -1) * 2.0**shifts
    most = steps / 2 @ np.abs(plain).T
    scale = np.abs(x) @ np.abs(plain).T
    assert np.all(np.abs(np.array(y) - x @ plain.T) <= most * 1.01 + 2e-6 * scale)
    (alone,) = kernels.linear(mx.array(x[-1:], mx.float32), [scaled], [None])
    assert mx.array_equal(alone, y[-1:])
    tokens = mx.array(rng.integers(0, outputs, (5, 1)))
    assert mx.array_equal(kernels.embed(tokens, scaled), kernels.embed(tokens, unscaled))


@EXAMPLES
@given(
    rows=NUM_ROWS,
    outputs=st.integers(1, 200),
    groups=st.integers(1, 12),
    mode=st.sampled_from(["affine", "mxfp4", "none"]),
    exponent=st.integers(-60, 20),
    seed=st.integers(0, 1000),
)
def test_products_in_bfloat16(
    kernels: Any, rows: int, outputs: int, groups: int, mode: str, exponent: int, seed: int
) -> None:
    """Inputs and dequantized weights lose as much as bfloat16 does, whatever the size of the weights."""
    if not kernels.supports_bfloat16():
        pytest.skip("this processor has no matrix unit")
    rng = np.random.default_rng(seed)
    size = 32 * groups
    weight = mx.array((rng.standard_normal((outputs, size)) * 2.0**exponent).astype(np.float32))
    if mode == "none":
        plain = weight.astype(mx.bfloat16)
        packed = kernels.pack(plain)
    else:
        parts = mx.quantize(weight, group_size=32, bits=4, mode=mode)
        plain = mx.dequantize(*parts, group_size=32, bits=4, mode=mode)
        biases = None if mode == "mxfp4" else parts[2]
        packed = kernels.pack(*parts[:2], biases, 4, input_bits=16)
    kernels.use_bfloat16([packed])
    exact = np.array(plain.astype(mx.float32)).astype(np.float64)
    x = rng.standard_normal((rows, size)).astype(np.float32)
    (y,) = kernels.linear(mx.array(x), [packed], [None])
    # Both are rounded to 8 bits; before that, weights were to float16.
    most = (2.02 * 2.0**-8 + 2.0**-10) * (np.abs(x) @ np.abs(exact).T)
    largest = np.abs(exact).max() * np.abs(x).sum(axis=-1, keepdims=True)
    assert np.all(np.abs(np.array(y) - x @ exact.T) <= most + 2.0**-11 * largest)
    (alone,) = kernels.linear(mx.array(x[-1:]), [packed], [None])
    assert mx.array_equal(alone, y[-1:])


@pytest.mark.parametrize("is_centered", [False, True])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_nan_and_infinite_inputs_give_nan(
    kernels: Any, *, is_scaled: bool, is_centered: bool
) -> None:
    if kernels.min_input_bits() > (8 if is_scaled else 16):
        pytest.skip("this processor has no products of such integers")
    words, scales, biases = mx.quantize(mx.ones((40, 64)), group_size=32)
    packed = kernels.pack(words, scales, -8 * scales if is_centered else biases, 4, input_bits=16)
    if is_scaled:
        kernels.scale_inputs([packed], bytes([1, 2] * 32))
    x = mx.zeros((3, 64))
    x[0, 5] = mx.nan
    x[1, 40] = mx.inf
    (y,) = kernels.linear(x, [packed], [None])
    assert np.isnan(np.array(y[:2])).all()
    assert np.array_equal(np.array(y[2]), np.zeros(40))


@EXAMPLES
@given(
    rows=NUM_ROWS,
    outputs=st.lists(st.integers(1, 130), min_size=1, max_size=3),
    inputs=st.integers(1, 300),
    is_half=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_products_of_several_matrices_with_one_input(
    kernels: Any, rows: int, outputs: list[int], inputs: int, is_half: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    dtype = mx.bfloat16 if is_half else mx.float32
    matrices = [floats(kernels, rng, (size, inputs), dtype) for size in outputs]
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    results = kernels.linear(mx.array(x), [w.packed for w in matrices], [None] * len(matrices))
    for y, weights in zip(results, matrices, strict=True):
        check(y, x @ weights.plain.T, 1e-5)


@EXAMPLES
@given(
    rows=NUM_ROWS,
    outputs=st.integers(1, 200),
    bits=st.sampled_from([0, 4, 8]),
    has_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_argmax_of_a_product(
    kernels: Any, rows: int, outputs: int, bits: int, has_bias: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    # Few numbers, so that many outputs are equal.
    weight = mx.array(rng.integers(-2, 3, (outputs, 32)).astype(np.float32))
    packed = kernels.pack(*mx.quantize(weight, 32, bits), bits) if bits else kernels.pack(weight)
    bias = mx.array(rng.integers(-2, 3, outputs).astype(np.float32)) if has_bias else None
    x = mx.array(rng.integers(-2, 3, (rows, 1, 32)).astype(np.float32))
    (product,) = kernels.linear(x, [packed], [bias])
    indices, largest = kernels.arg_max(product.squeeze(1))
    logits = np.array(product)[:, 0]
    assert indices.dtype == mx.uint32
    assert np.array(indices).tolist() == logits.argmax(-1).tolist()
    assert np.array(largest).tolist() == logits.max(-1).tolist()
    # The same for logits that are evaluated already.
    again, same = kernels.arg_max(mx.array(logits))
    assert mx.array_equal(again, indices)
    assert mx.array_equal(same, largest)


def test_argmax_does_not_write_the_product(kernels: Any) -> None:
    packed = kernels.pack(mx.random.normal((50_000, 32)))
    x = mx.random.normal((16, 32))
    mx.eval(x)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(kernels.arg_max(kernels.linear(x, [packed], [None])[0]))
    assert mx.get_peak_memory() - before < 10_000


@pytest.mark.parametrize("where", [0, 77, 199])
def test_the_argmax_of_a_row_with_nan_is_nan(kernels: Any, where: int) -> None:
    weight = np.ones((200, 32), np.float32)
    weight[where] = np.nan
    (product,) = kernels.linear(mx.ones((3, 32)), [kernels.pack(mx.array(weight))], [None])
    _, largest = kernels.arg_max(product)
    assert np.isnan(np.array(largest)).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_with_scales_of_float16_are_dequantized_in_float32(kernels: Any, bits: int) -> None:
    """Bit for bit q * scale + bias, by products with the rows of a unit matrix."""
    weight = mx.random.normal((70, 128), key=mx.random.key(bits)).astype(mx.float16)
    words, scales, biases = mx.quantize(weight, group_size=32, bits=bits)
    exact = scales.astype(mx.float32), biases.astype(mx.float32)
    plain = mx.dequantize(words, *exact, group_size=32, bits=bits)
    packed = kernels.pack(words, scales, biases, bits)
    (y,) = kernels.linear(mx.eye(128), [packed], [None])
    assert mx.array_equal(y.T, plain)
    embedded = kernels.embed(mx.array([[3], [69]]), packed)
    assert mx.array_equal(embedded[:, 0], plain[mx.array([3, 69])])


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("is_centered", [False, True])
def test_scales_that_are_products_are_kept_as_their_factors(
    kernels: Any, bits: int, is_centered: bool
) -> None:
    """As of GGUF's K types: the same weights to the bit, in half the bytes of float32 scales."""
    rng = np.random.default_rng(bits)
    outputs, groups = 70, 16
    words = mx.array(rng.integers(0, 1 << 32, (outputs, groups * bits), np.uint32))
    scales, biases = (
        rng.uniform(0.001, 0.02, (outputs, groups // 8)).astype(np.float16).repeat(8, axis=1)
        * rng.integers(low, high, (outputs, groups)).astype(np.float32)
        for low, high in ((-32, 64), (-63, 1))
    )
    scales[3], biases[5] = 0, 0
    if is_centered:
        biases = -(1 << bits - 1) * scales
    parts = words, mx.array(scales), mx.array(biases)
    packed = kernels.pack(*parts, bits)
    columns = kernels.pack(mx.zeros((1, 32))).nbytes // 128
    panels = -(-outputs // columns)
    of_group = 32 * (4 if bits <= 4 else 8) // 8 + (1 if is_centered else 2)
    of_factors = 2 if is_centered else 4
    assert packed.nbytes == panels * columns * groups // 8 * (8 * of_group + of_factors)
    plain = mx.dequantize(*parts, group_size=32, bits=bits)
    tokens = mx.array([[3], [5], [69]])
    embedded = kernels.embed(tokens, packed)[:, 0]
    assert mx.abs(embedded - plain[tokens[:, 0]]).max() <= 1e-6 * mx.abs(plain).max()
    for rows in (1, 3, 13, 40):
        x = mx.array(rng.standard_normal((rows, groups * 32)).astype(np.float32))
        (y,) = kernels.linear(x, [packed], [None])
        check(y, np.array(x) @ np.array(plain).T, 1e-5)
        if kernels.min_input_bits() <= 16:
            (y,) = kernels.linear(x, [kernels.pack(*parts, bits, input_bits=16)], [None])
            check(y, np.array(x) @ np.array(plain).T, 1e-3)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", 4, 8])
def test_a_rows_product_does_not_depend_on_the_others(kernels: Any, kind: Any) -> None:
    rng = np.random.default_rng(1)
    if isinstance(kind, str):
        packed = floats(kernels, rng, (150, 320), getattr(mx, kind)).packed
    else:
        packed = quantized(kernels, rng, (150, 320), 32, kind).packed
    x = mx.array(rng.standard_normal((130, 320)).astype(np.float32))
    (together,) = kernels.linear(x, [packed], [None])
    for size in (1, 2, 5, 6, 7, 12, 13, 100):
        (few,) = kernels.linear(x[30 : 30 + size], [packed], [None])
        assert mx.array_equal(few, together[30 : 30 + size])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", 4, 8])
def test_rows_of_the_weights_are_looked_up(kernels: Any, kind: Any) -> None:
    rng = np.random.default_rng(2)
    if isinstance(kind, str):
        weights = floats(kernels, rng, (150, 320), getattr(mx, kind))
    else:
        weights = quantized(kernels, rng, (150, 320), 64, kind)
    tokens = rng.integers(0, 150, (40, 1))
    check(kernels.embed(mx.array(tokens), weights.packed), weights.plain[tokens], 1e-6)


@EXAMPLES
@given(rows=st.integers(1, 40), size=st.integers(1, 700), seed=st.integers(0, 1000))
def test_norms_and_activations(kernels: Any, rows: int, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, gate = (rng.standard_normal((rows, size)).astype(np.float32) * 4 for _ in range(2))
    weight = rng.standard_normal(size).astype(np.float32)
    mean = np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True)
    check(kernels.rms_norm(mx.array(x), mx.array(weight), 1e-5), x / np.sqrt(mean + 1e-5) * weight)
    check(kernels.rms_norm(mx.array(x), None, 1e-5), x / np.sqrt(mean + 1e-5))
    expected = gate / (1 + np.exp(-gate.astype(np.float64))) * x
    check(kernels.swiglu(mx.array(gate), mx.array(x)), expected)
    check(kernels.silu(mx.array(gate)), expected / x)
    wide = gate.astype(np.float64)
    inner = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
    check(kernels.gelu(mx.array(gate)), wide / 2 * (1 + np.tanh(inner)))


def test_activations_in_functions_compiled_for_any_shape(kernels: Any) -> None:
    compiled = mx.compile(
        lambda gate, x: kernels.silu(gate) * x + kernels.swiglu(gate, x) + kernels.gelu(gate),
        shapeless=True,
    )
    for size in (5, 300):
        gate, x = mx.random.normal((2, 3, size))
        expected = 2 * gate * mx.sigmoid(gate) * x + nn.gelu_approx(gate)
        assert mx.allclose(compiled(gate, x), expected, rtol=1e-5, atol=1e-6)


def test_activations_of_any_number(kernels: Any) -> None:
    gate = np.array([-np.inf, -1e30, -88, -87, 0, 87, 88, 89, 1e30, np.inf, np.nan], np.float32)
    y = np.array(kernels.swiglu(mx.array(gate), mx.ones(len(gate))))
    with np.errstate(all="ignore"):
        expected = gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64)))
    np.testing.assert_allclose(y[1:], expected[1:], rtol=1e-6, atol=1e-37)


def test_angles_of_positions_that_are_not_known_yet(kernels: Any) -> None:
    frequencies = kernels.Frequencies([1.0, 0.25, 1e-3], 0.5)
    positions = np.array([0, 3, 4, 7, 40_000, 41, 42], np.int32)
    at_once = kernels.angles(mx.array(positions), frequencies)
    for later in (mx.array(positions) + 0, mx.array(np.repeat(positions, 2))[::2]):
        for known, computed in zip(at_once, kernels.angles(later, frequencies), strict=True):
            assert np.array_equal(np.array(known), np.array(computed))
    expected = 0.5 * np.sin(positions[:, None] * np.array([1.0, 0.25, 1e-3]))
    check(at_once[1], expected.astype(np.float32), 1e-6)


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dims", [64, 32])
def test_rotary_embedding(kernels: Any, traditional: bool, dims: int) -> None:
    rng = np.random.default_rng(3)
    x = mx.array(rng.standard_normal((9, 3, 1, 64)).astype(np.float32))
    positions = np.arange(9) * 17
    angles = positions[:, None] * 10000.0 ** (-np.arange(0, dims, 2) / dims)
    cosines, sines = (mx.array(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
    expected = mx.fast.rope(
        x, dims, traditional=traditional, base=10000.0, scale=1.0, offset=mx.array(positions)
    )
    check(kernels.rope(x, cosines, sines, traditional), np.array(expected), 2e-5)


# Attention


def hadamard(vectors: npt.NDArray[Any], num: int) -> npt.NDArray[Any]:
    """Multiply every `num` numbers by a Hadamard matrix, in the kernels' order of sums."""
    half = 1
    while half < num:
        pairs = vectors.reshape(*vectors.shape[:-1], -1, 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        vectors = np.stack([a + b, a - b], axis=-2).reshape(vectors.shape)
        half *= 2
    return vectors


@dataclass
class Layer:
    """Requests whose keys and values are all known, and the blocks that they have in a pool."""

    kernels: Any
    rng: np.random.Generator
    block_size: int
    lengths: list[int]
    num_heads: int
    group: int
    key_dim: int
    value_dim: int
    bits: int = 32
    rounds_inputs: bool = False

    def __post_init__(self) -> None:
        counts = [-(-length // self.block_size) for length in self.lengths]
        blocks = self.rng.permutation(sum(counts) + 3).tolist()
        ends = np.cumsum([0, *counts]).tolist()
        self.tables = [blocks[start:end] for start, end in pairwise(ends)]
        self.keys, self.values = (
            [self.random(n, self.num_heads, dim) for n in self.lengths]
            for dim in (self.key_dim, self.value_dim)
        )
        self.pool = self.kernels.pool(
            len(blocks),
            self.block_size,
            self.num_heads,
            self.key_dim,
            self.value_dim,
            self.bits,
            self.rounds_inputs,
        )

    @property
    def tolerance(self) -> float:
        """Return how far outputs may be off: rounded ones by a share of the largest values."""
        return {32: 2e-5, 16: 3e-2, 8: 2e-3}[self.bits] if self.rounds_inputs else 2e-5

    def random(self, *shape: int) -> Floats:
        return self.rng.standard_normal(shape).astype(np.float32)

    def stored(self, vectors: Floats, num_rotated: int = 1) -> npt.NDArray[np.float64]:
        """Return what the pool keeps of vectors."""
        if self.bits == 16:
            halves = mx.array(vectors).astype(mx.bfloat16)
            return np.array(halves.astype(mx.float32)).astype(np.float64)
        if self.bits == 32:
            return vectors.astype(np.float64)
        rotated = hadamard(vectors, num_rotated)
        largest = np.abs(rotated).max(axis=-1, keepdims=True)
        integers = np.round(rotated.astype(np.float64) * (np.float32(127) / largest))
        return hadamard(integers * (largest / 127), num_rotated) / num_rotated

    def queries(self, slices: list[tuple[int, int, int]]) -> Floats:
        return self.random(
            sum(b - a for _, a, b in slices), self.num_heads * self.group, self.key_dim
        )

    def attend(
        self, slices: list[tuple[int, int, int]], queries: Floats, **options: Any
    ) -> npt.NDArray[np.float32]:
        """Write and attend positions [start, stop) of requests: (request, start, stop)."""
        rows: list[tuple[int, int, int, int, int]] = []
        tables: list[int] = []
        slots: list[int] = []
        for request, start, stop in slices:
            rows.append((len(slots), stop - start, start, len(tables), 0))
            tables += self.tables[request]
            slots += [
                self.tables[request][p // self.block_size] * self.block_size + p % self.block_size
                for p in range(start, stop)
            ]
        step = self.kernels.step(*(np.array(part, np.int32) for part in (rows, tables, slots)))
        parts = [
            np.concatenate([each[r][a:b] for r, a, b in slices])[:, :, None]
            for each in (self.keys, self.values)
        ]
        arrays = map(mx.array, (queries[:, :, None], *parts))
        y = self.kernels.attend(*arrays, self.pool, step, **options)
        return np.array(y)[:, :, 0]

    def expected(
        self,
        slices: list[tuple[int, int, int]],
        queries: Floats,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        sinks: Floats | None = None,
        is_chunked: bool = False,
    ) -> npt.NDArray[np.float64]:
        results = []
        num_rotated = self.key_dim & -self.key_dim
        all_keys = [self.stored(keys, num_rotated) for keys in self.keys]
        all_values = [self.stored(values) for values in self.values]
        positions = [(r, p) for r, start, stop in slices for p in range(start, stop)]
        for row, (request, position) in enumerate(positions):
            first = max(0, position - window + 1) if window else 0
            if is_chunked and window:
                first = position - position % window
            for head in range(self.num_heads * self.group):
                seen = slice(first, position + 1)
                keys = all_keys[request][seen, head // self.group]
                scores = keys @ queries[row, head] * scale
                if soft_cap:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                sink = [] if sinks is None else [sinks[head]]
                highest = max([scores.max(), *sink])
                weights = np.exp(scores - highest)
                total = weights.sum() + sum(np.exp(s - highest) for s in sink)
                results.append(weights @ all_values[request][seen, head // self.group] / total)
        return np.array(results).reshape(len(positions), -1, self.value_dim)


@EXAMPLES
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 4, 16, 32, 48]),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 5)),
    dims=st.tuples(st.sampled_from([8, 64, 80]), st.sampled_from([8, 64, 72])),
    window=st.sampled_from([0, 1, 7, 40]),
    is_chunked=st.booleans(),
    soft_cap=st.sampled_from([0.0, 3.0]),
    has_sinks=st.booleans(),
    bits=st.sampled_from([32, 16, 8]),
    rounds_inputs=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_attention_of_ragged_steps(
    kernels: Any,
    lengths: list[int],
    block_size: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    window: int,
    is_chunked: bool,
    soft_cap: float,
    has_sinks: bool,
    bits: int,
    rounds_inputs: bool,
    seed: int,
) -> None:
    """Each request is read in two steps, cut anywhere, beside the others."""
    rng = np.random.default_rng(seed)
    layer = Layer(kernels, rng, block_size, lengths, *heads, *dims, bits, rounds_inputs)
    sinks = rng.standard_normal(heads[0] * heads[1]).astype(np.float32) if has_sinks else None
    cuts = [int(rng.integers(0, length)) for length in lengths]
    steps = [
        [(r, 0, cut) for r, cut in enumerate(cuts) if cut],
        [(r, cut, length) for r, (cut, length) in enumerate(zip(cuts, lengths, strict=True))],
    ]
    options: dict[str, Any] = {"scale": 0.3, "soft_cap": soft_cap}
    options |= {"window": window, "is_chunked": is_chunked}
    for slices in filter(None, steps):
        queries = layer.queries(slices)
        y = layer.attend(
            slices, queries, **options, sinks=None if sinks is None else mx.array(sinks)
        )
        expected = layer.expected(slices, queries, **options, sinks=sinks)
        np.testing.assert_allclose(y, expected, rtol=0, atol=layer.tolerance)


def test_one_key_head_may_have_many_query_heads(kernels: Any) -> None:
    """More than make a tile, as in multi-query attention (Shazeer 2019)."""
    layer = Layer(kernels, np.random.default_rng(7), 32, [300, 5], 1, 71, 64, 64)
    slices = [(0, 0, 300), (1, 3, 5)]
    layer.attend([(1, 0, 3)], layer.queries([(1, 0, 3)]), scale=0.1)
    queries = layer.queries(slices)
    y = layer.attend(slices, queries, scale=0.1)
    expected = layer.expected(slices, queries, scale=0.1)
    np.testing.assert_allclose(y, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("bits", [32, 16, 8])
@pytest.mark.parametrize("rounds_inputs", [False, True])
def test_a_rows_attention_does_not_depend_on_the_step(
    native: Native, bits: int, rounds_inputs: bool
) -> None:
    """Alone, in a chunk, beside others, spans shared out among threads or not: the same bits."""
    rng = np.random.default_rng(4)
    layer = Layer(native.module, rng, 32, [700, 40, 300], 2, 3, 64, 64, bits, rounds_inputs)
    whole = [(0, 0, 700), (1, 0, 40), (2, 0, 300)]
    queries = layer.queries(whole)
    together = layer.attend(whole, queries, scale=0.125)
    alone = layer.attend([(0, 699, 700)], queries[699:700], scale=0.125)
    assert np.array_equal(alone, together[699:700])
    chunk = layer.attend(
        [(0, 670, 690), (2, 299, 300)], queries[[*range(670, 690), -1]], scale=0.125
    )
    assert np.array_equal(chunk, together[[*range(670, 690), -1]])
    try:
        native.module.set_num_threads(1)
        assert np.array_equal(layer.attend(whole, queries, scale=0.125), together)
    finally:
        native.module.set_num_threads(native.num_threads)


@pytest.mark.parametrize("bits", [32, 16, 8])
def test_a_copied_block_is_read_like_the_original(kernels: Any, bits: int) -> None:
    layer = Layer(kernels, np.random.default_rng(5), 4, [8], 2, 1, 8, 8, bits)
    slices = [(0, 0, 8)]
    queries = layer.queries(slices)
    y = layer.attend(slices, queries, scale=1.0)
    (first, second), free = layer.tables[0], 0
    free = next(b for b in range(5) if b not in (first, second))
    kernels.copy_blocks([layer.pool], *(np.array([b], np.int32) for b in (first, free)))
    layer.tables[0] = [free, second]
    last = layer.attend([(0, 7, 8)], queries[7:], scale=1.0)
    assert np.array_equal(last, y[7:])


def test_others_run_while_blocks_are_copied(kernels: Any) -> None:
    """Python has no turn of its own for another thread: what runs then runs in the copy."""
    pool = kernels.pool(2, 32, 8, 64, 64)
    ids = np.array([0], np.int32), np.array([1], np.int32)
    begun, has_run = threading.Event(), False

    def run() -> None:
        nonlocal has_run
        begun.wait()
        has_run = True

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=run)
    thread.start()
    sys.setswitchinterval(3600)
    try:
        begun.set()
        for _ in range(10_000):
            kernels.copy_blocks([pool], *ids)
            if has_run:
                break
        assert has_run
    finally:
        sys.setswitchinterval(interval)
        thread.join()


def test_a_step_copies_the_blocks_of_all_layers_at_once(native: Native) -> None:
    calls: list[tuple[int, list[int], list[int]]] = []

    def copy_blocks(pools: list[Any], sources: Any, targets: Any) -> None:
        calls.append((len(pools), sources.tolist(), targets.tolist()))
        native.module.copy_blocks(pools, sources, targets)

    counting = SimpleNamespace(pool=native.module.pool, copy_blocks=copy_blocks)
    shape = LayerShape(2, 8, 8, mx.float32)
    cache = native_cache(replace(native, module=counting), [shape] * 3, 8, 4)
    cache.copy_blocks([BlockCopy(1, 3), BlockCopy(5, 0)])
    assert calls == [(3, [1, 5], [3, 0])]


def test_rows_of_padding_are_zero(kernels: Any) -> None:
    layer = Layer(kernels, np.random.default_rng(6), 4, [3], 1, 2, 8, 8)
    step = kernels.step(*(np.array(a, np.int32) for a in ([(0, 1, 0, 0, 0)], layer.tables[0], [0])))
    ones = mx.ones((3, 1, 1, 8))
    y = kernels.attend(mx.ones((3, 2, 1, 8)), ones, ones, layer.pool, step, 1.0)
    assert np.array_equal(np.array(y[1:]), np.zeros((2, 2, 1, 8)))


def test_wrong_shapes_are_rejected(kernels: Any) -> None:
    packed = kernels.pack(mx.ones((4, 8)))
    parts = mx.quantize(mx.ones((4, 64)), bits=4)
    unlike = [
        kernels.pack(*parts, 4),
        kernels.pack(*mx.quantize(mx.ones((4, 64)), group_size=32), 4),
    ]
    if kernels.min_input_bits() <= 16:
        unlike.append(kernels.pack(*parts, 4, input_bits=16))
    if kernels.min_input_bits() == 8:
        unlike.append(kernels.pack(*parts, 4, input_bits=16))
        kernels.scale_inputs(unlike[-1:], bytes(64))
    layer = kernels.expert_layer(packed)
    pool = kernels.pool(2, 4, 2, 8, 8)
    step = kernels.step(*(np.array(a, np.int32) for a in ([(0, 1, 0, 0, 0)], [0], [0])))
    good = mx.ones((1, 2, 1, 8))
    calls: list[Callable[[], Any]] = [
        lambda: kernels.linear(mx.ones((1, 7)), [packed], [None]),
        lambda: kernels.linear(mx.ones((1, 8)), [packed], []),
        lambda: kernels.linear(mx.ones((1, 8)), [packed], [mx.ones(3)]),
        *(
            partial(kernels.linear, mx.ones((1, 64)), [one, other], [None, None])
            for one, other in pairwise(unlike)
        ),
        lambda: kernels.scale_inputs([unlike[0]], bytes(64)),
        lambda: kernels.scale_inputs([unlike[-1]], bytes(63)),
        lambda: kernels.pack(mx.ones(8)),
        lambda: kernels.pack(*parts, 4, input_bits=7),
        lambda: kernels.pack(*parts, 9),
        lambda: kernels.pack(parts[0], mx.ones((4, 8)), mx.ones((4, 8)), 4),
        lambda: kernels.pack(parts[0], parts[1], None, 4),
        lambda: kernels.expert_layer(packed, mx.ones((2, 4))),
        lambda: kernels.gated_experts(layer, layer, layer),
        lambda: kernels.swiglu(mx.ones(3), mx.ones(4)),
        lambda: kernels.rms_norm(mx.ones((2, 8)), mx.ones(7), 1e-5),
        lambda: kernels.rope(mx.ones((2, 1, 1, 8)), mx.ones((2, 5)), mx.ones((2, 5)), False),
        lambda: kernels.pool(2, 4, 2, 8, 8, 4),
        lambda: kernels.attend(good, good, mx.ones((1, 2, 1, 4)), pool, step, 1.0),
        lambda: kernels.attend(mx.ones((1, 3, 1, 8)), good, good, pool, step, 1.0),
        lambda: kernels.attend(good, good, good, pool, step, 1.0, sinks=mx.ones(3)),
        lambda: kernels.attend(mx.ones((1, 258, 1, 8)), good, good, pool, step, 1.0),
        lambda: kernels.pool(0, 4, 2, 8, 8),
        lambda: kernels.copy_blocks([pool], np.array([0], np.int32), np.array([2], np.int32)),
        lambda: kernels.copy_blocks([pool], np.array([0], np.int32), np.array([], np.int32)),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"\w+ \w+"):
            call()
