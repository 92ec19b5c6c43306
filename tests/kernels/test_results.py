"""Kernels on the CPU against float64, with the threads in several orders: each gives the same bits."""

from typing import Any

import numpy as np
import pytest

from batching.backend.platforms.gpu.kernels.definitions import (
    KVWrite,
    MergeSplits,
    NormRopeWrite,
    PagedDecode,
    PoolShape,
)
from batching.backend.platforms.gpu.kernels.sources import DType, Target
from tests.kernels.cases import decode_case, no_token, numbers, pad, quantized, same_bits, stored
from tests.kernels.cpu_target import ORDERS, Array, CPUKernel

pytestmark = pytest.mark.kernels

BF16, F16, F32, INT8 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, DType.INT8
# Halves of the last bit, relative.
ROUNDING = {BF16: 2**-8, F16: 2**-11, F32: 2**-22}


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dim", "dtype", "options"),
    [
        (2, 2, 64, F32, {}),
        (6, 2, 80, F16, {}),
        (8, 2, 96, BF16, {"soft_cap": 5.0}),
        (8, 1, 128, BF16, {"block_size": 32}),
        (8, 2, 128, F32, {"block_size": 24}),
        (8, 2, 256, F16, {"soft_cap": 30.0}),
        (3, 1, 256, BF16, {}),
        (14, 2, 64, BF16, {}),
        # Eight heads of sixteen at once; a prime number of heads, one at once.
        (16, 1, 128, F16, {}),
        (11, 1, 64, F16, {}),
        (4, 2, 192, BF16, {"value_dim": 128}),
        (8, 2, 128, BF16, {"pool_dtype": F16}),
        (8, 2, 128, BF16, {"pool_dtype": INT8}),
        (3, 1, 80, F32, {"pool_dtype": INT8, "soft_cap": 5.0}),
        # Latent attention.
        (16, 1, 576, BF16, {"value_dim": 512, "values_in_keys": True}),
        (6, 1, 48, F32, {"value_dim": 40, "values_in_keys": True}),
    ],
)
def test_paged_decode_and_merge_are_attention(
    num_heads: int, num_kv_heads: int, dim: int, dtype: DType, options: dict[str, Any]
) -> None:
    case = decode_case(num_heads, num_kv_heads, dim, dtype, **options)
    kernel = CPUKernel(case.kernel.source(Target.CPU))
    results = []
    for order in ORDERS:
        outputs = case.outputs()
        kernel(case.inputs, outputs, case.launch, order)
        results.append(outputs)
    for partials, stats in results[1:]:
        assert same_bits(partials, results[0][0])
        assert same_bits(stats, results[0][1])
    # The text for a GPU, its words on fibers, gives these bits too.
    for target in (Target.CUDA, Target.METAL):
        outputs = case.outputs()
        CPUKernel(case.kernel.source(target))(case.inputs, outputs, case.launch)
        assert same_bits(outputs[0], results[0][0])
        assert same_bits(outputs[1], results[0][1])
    # Numbers of about 1: float32 has some 1e-7 for each.
    np.testing.assert_allclose(case.merged(results[0]), case.expected, rtol=0, atol=2e-6)


def test_a_nan_in_a_visible_key_makes_its_row_nan_and_no_other() -> None:
    case = decode_case(4, 2, 64, F32, ranges=[(0, 600), (0, 600)])
    keys = case.inputs[1].reshape(2, -1, 64)
    slot = case.inputs[3][0, 3] * 16
    keys[:, slot] = np.nan
    outputs = case.outputs()
    CPUKernel(case.kernel.source(Target.CPU))(case.inputs, outputs, case.launch)
    merged = case.merged(outputs)
    assert np.isnan(merged[0]).all()
    np.testing.assert_allclose(merged[1], case.expected[1], rtol=0, atol=2e-6)


@pytest.mark.parametrize("target", Target)
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_merge_splits_joins_what_has_keys(target: Target, dtype: DType, has_sinks: bool) -> None:
    rows, heads, splits, dim = 3, 2, 4, 80
    random = np.random.default_rng(0)
    partials = random.standard_normal((rows, heads, splits, dim)).astype(np.float32)
    stats = np.stack(
        [
            random.uniform(-40, 40, (rows, heads, splits)),
            random.uniform(1, 9, (rows, heads, splits)),
        ],
        axis=-1,
    ).astype(np.float32)
    # Row 1 has keys in two splits, and row 2 has none.
    for row, used in ((1, 2), (2, 0)):
        stats[row, :, used:] = (-np.inf, 0)
        partials[row, :, used:] = np.nan
    sinks = pad(np.array([20, -20], np.float32)) if has_sinks else None

    merge = MergeSplits(dtype, heads, dim, has_sinks)
    out = stored(np.full((rows, heads, dim), np.nan), dtype)
    token, next_token = np.arange(8, dtype=np.uint32), no_token()
    inputs = [partials, stats, *([] if sinks is None else [sinks]), token]
    CPUKernel(merge.source(target))(inputs, [out, next_token], merge.launch(rows))

    for row, used in ((0, 4), (1, 2), (2, 0)):
        for head in range(heads):
            largest, sums = stats[row, head, :used].astype(np.float64).T
            sink = -np.inf if sinks is None else float(sinks[head])
            shift = max(*largest, sink, -1e9)
            weights = np.exp(largest - shift)
            total = weights @ sums + np.exp(sink - shift)
            expected = weights @ partials[row, head, :used] / (total or 1)
            found = numbers(out[row, head], dtype)
            np.testing.assert_allclose(found, expected, rtol=ROUNDING[dtype], atol=1e-6)
    assert (next_token == token).all()


def empty_pools(pool: PoolShape, num_slots: int) -> tuple[Array, Array]:
    """Return pools of -1, which nothing writes here."""
    rows = pool.num_kv_heads * num_slots
    key_pool, value_pool = (
        stored(np.full((rows, dim), -1.0), pool.dtype) for dim in (pool.key_dim, pool.value_dim)
    )
    return key_pool, value_pool


@pytest.mark.parametrize("target", Target)
@pytest.mark.parametrize(("dtype", "pool_dtype"), [(BF16, BF16), (F16, F16), (F32, F16)])
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_kv_write_writes_the_slots_and_nothing_else(
    target: Target, dtype: DType, pool_dtype: DType, num_tokens: int
) -> None:
    pool = PoolShape(3, 64, 80, pool_dtype)
    random = np.random.default_rng(1)
    keys = stored(random.standard_normal((num_tokens, 3, 64)), dtype)
    values = stored(random.standard_normal((num_tokens, 3, 80)), dtype)
    slots = random.permutation(64)[:num_tokens].astype(np.uint32)
    # Of the last token, which is padding where there are others.
    slots[1:][-1:] = 64
    key_pool, value_pool = empty_pools(pool, 64)
    expected = [array.copy().reshape(3, 64, -1) for array in (key_pool, value_pool)]
    for array, new in zip(expected, (keys, values), strict=True):
        written = slots < 64
        array[:, slots[written]] = stored(numbers(new[written], dtype), pool_dtype).swapaxes(0, 1)

    kernel, next_token = KVWrite(pool, dtype), no_token()
    token = np.arange(8, dtype=np.uint32)
    CPUKernel(kernel.source(target))(
        [keys, values, pad(slots), key_pool, value_pool, token],
        [next_token],
        kernel.launch(num_tokens),
    )
    assert same_bits(key_pool, expected[0])
    assert same_bits(value_pool, expected[1])
    assert (next_token == token).all()


@pytest.mark.parametrize("target", Target)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_kv_write_rounds_each_row_to_8_bits(target: Target, dtype: DType) -> None:
    pool = PoolShape(3, 64, 80, INT8)
    kernel = KVWrite(pool, dtype)
    random = np.random.default_rng(4)
    new = [stored(random.standard_normal((4, 3, dim)), dtype) for dim in (64, 80)]
    new[0][1, 2] = 0
    new[1][2, 0, 70] = stored(np.array(np.nan), dtype)
    new[1][3, 1, 5] = stored(np.array(-np.inf), dtype)
    slots = np.array([31, 4, 17, 9], np.uint32)
    pools = [np.full((96, dim), -1, np.int8) for dim in (64, 80)]
    scales = [np.full(96, -1, np.float32) for _ in range(2)]
    for order in ORDERS:
        CPUKernel(kernel.source(target))(
            [*new, pad(slots), *pools, *scales, no_token()], [no_token()], kernel.launch(4), order
        )
        for rows, integers, factors in zip(new, pools, scales, strict=True):
            by_head = integers.reshape(3, 32, -1)[:, slots].swapaxes(0, 1)
            by_head_scales = factors.reshape(3, 32)[:, slots].swapaxes(0, 1)
            expected, expected_scales = quantized(numbers(rows, dtype).reshape(12, -1))
            # A number in the middle of two integers may become either.
            assert np.abs(by_head.reshape(12, -1) - expected.astype(int)).max() <= 1
            assert (by_head.reshape(12, -1) != expected).mean() < 0.01
            found = by_head_scales.reshape(-1)
            finite = np.isfinite(expected_scales)
            np.testing.assert_allclose(found[finite], expected_scales[finite], rtol=1e-6)
            assert np.isnan(found[~finite]).all()
            untouched = np.setdiff1d(np.arange(32), slots)
            assert (integers.reshape(3, 32, -1)[:, untouched] == -1).all()


@pytest.mark.parametrize("target", Target)
def test_kv_write_copies_rows_of_8_bits_with_their_scales(target: Target) -> None:
    kernel = KVWrite(PoolShape(3, 64, 80, INT8), INT8)
    random = np.random.default_rng(4)
    new: list[Array] = [random.integers(-127, 128, (4, 3, dim)).astype(np.int8) for dim in (64, 80)]
    new_scales: list[Array] = [random.standard_normal(12).astype(np.float32) for _ in range(2)]
    new_scales[0][5] = np.nan
    slots = np.array([31, 4, 32, 9], np.uint32)
    pools: list[Array] = [np.full((96, dim), -1, np.int8) for dim in (64, 80)]
    scales: list[Array] = [np.full(96, -1, np.float32) for _ in range(2)]
    expected = [array.reshape(3, 32, -1).copy() for array in (*pools, *scales)]
    for array, rows in zip(expected, (*new, *new_scales), strict=True):
        array[:, [31, 4, 9]] = rows.reshape(4, 3, -1)[[0, 1, 3]].swapaxes(0, 1)
    token = np.arange(8, dtype=np.uint32)
    for order in ORDERS:
        next_token = no_token()
        CPUKernel(kernel.source(target))(
            [*new, *new_scales, pad(slots), *pools, *scales, token],
            [next_token],
            kernel.launch(4),
            order,
        )
        for found, wanted in zip((*pools, *scales), expected, strict=True):
            assert same_bits(found, wanted)
        assert (next_token == token).all()


def test_kv_write_of_latents_writes_keys_alone() -> None:
    pool = PoolShape(1, 48, 40, F32, values_in_keys=True)
    kernel = KVWrite(pool, F32)
    keys = np.random.default_rng(1).standard_normal((2, 1, 48)).astype(np.float32)
    key_pool = np.full((32, 48), -1, np.float32)
    slots = np.array([30, 2], np.uint32)
    CPUKernel(kernel.source(Target.CPU))(
        [keys, pad(slots), key_pool, no_token()], [no_token()], kernel.launch(2)
    )
    assert same_bits(key_pool[slots], keys[:, 0])
    assert (np.delete(key_pool, slots, axis=0) == -1).all()


def rotated(
    x: Array, positions: Array, inv_freq: Array, scale: float, *, traditional: bool
) -> Array:
    """Return rows `[T, H, D]` with their first dims rotated, in float64."""
    # The angle is a float32 in every implementation, and large ones tell.
    angles = (positions[:, None].astype(np.float32) * inv_freq).astype(np.float64)[:, None]
    cosine, sine = (f(angles) * scale for f in (np.cos, np.sin))
    half = len(inv_freq)
    first = slice(0, 2 * half, 2) if traditional else slice(0, half)
    second = slice(1, 2 * half, 2) if traditional else slice(half, 2 * half)
    made = x.copy()
    made[..., first] = x[..., first] * cosine - x[..., second] * sine
    made[..., second] = x[..., first] * sine + x[..., second] * cosine
    return made


@pytest.mark.parametrize("target", Target)
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize(
    ("dim", "rotary_dim", "traditional", "norm_eps", "rotary_scale"),
    [
        (128, 128, False, 1e-6, 1.0),
        (64, 64, True, None, 1.0),
        (80, 32, False, 1e-5, 1.2),
        (256, 64, True, 1e-6, 1.0),
        (64, 0, False, 1e-6, 1.0),
    ],
)
def test_norm_rope_write_is_norm_then_rotation_then_write(
    target: Target,
    dtype: DType,
    dim: int,
    rotary_dim: int,
    traditional: bool,
    norm_eps: float | None,
    rotary_scale: float,
) -> None:
    num_tokens, heads, kv_heads = 3, 5, 2
    pool = PoolShape(kv_heads, dim, 64, dtype)
    kernel = NormRopeWrite(pool, dtype, heads, rotary_dim, traditional, norm_eps, rotary_scale)
    random = np.random.default_rng(2)
    queries = stored(random.standard_normal((num_tokens, heads, dim)), dtype)
    keys = stored(random.standard_normal((num_tokens, kv_heads, dim)), dtype)
    values = stored(random.standard_normal((num_tokens, kv_heads, 64)), dtype)
    weights = [stored(random.uniform(0.5, 2, dim), dtype) for _ in range(2)]
    inv_freq = (10000.0 ** -np.linspace(0, 1, rotary_dim // 2)).astype(np.float32)
    positions = np.array([0, 7, 40000], np.int32)
    slots = np.array([31, 4, 17], np.uint32)
    key_pool, value_pool = empty_pools(pool, 32)

    def expected(buffer: Array, weight: Array) -> Array:
        x = numbers(buffer, dtype)
        if norm_eps is not None:
            x = x / np.sqrt((x * x).mean(-1, keepdims=True) + norm_eps) * numbers(weight, dtype)
        return rotated(x, positions, inv_freq, rotary_scale, traditional=traditional)

    out, next_token = stored(np.full(queries.shape, np.nan), dtype), no_token()
    token = np.arange(8, dtype=np.uint32)
    inputs = [queries, keys, values, *(weights if norm_eps is not None else [])]
    inputs += [pad(inv_freq), pad(positions), pad(slots), key_pool, value_pool, token]
    CPUKernel(kernel.source(target))(inputs, [out, next_token], kernel.launch(num_tokens))

    def check(found: Array, computed: Array) -> None:
        np.testing.assert_allclose(found, computed, rtol=ROUNDING[dtype], atol=1e-5)

    check(numbers(out, dtype), expected(queries, weights[0]))
    written = numbers(key_pool, dtype).reshape(kv_heads, 32, dim)
    check(written[:, slots].swapaxes(0, 1), expected(keys, weights[1]))
    assert same_bits(value_pool.reshape(kv_heads, 32, 64)[:, slots].swapaxes(0, 1).copy(), values)
    untouched = np.setdiff1d(np.arange(32), slots)
    assert (written[:, untouched] == -1).all()
    assert (next_token == token).all()


def test_what_a_kernel_cannot_do_is_said() -> None:
    with pytest.raises(ValueError, match="key_dim 100 is not a multiple of 8"):
        PoolShape(1, 100, 64, F16)
    pool = PoolShape(8, 64, 64, F16)
    with pytest.raises(ValueError, match="8 KV heads for 12 heads"):
        PagedDecode(pool, F16, 12, 16, 1.0)
    with pytest.raises(ValueError, match="shared memory"):
        PagedDecode(pool, F16, 64, 16, 1.0, split_keys=1024)
    with pytest.raises(ValueError, match="512 dims of values in keys of 64"):
        PoolShape(1, 64, 512, F16, values_in_keys=True)
    with pytest.raises(ValueError, match="8 bits"):
        PoolShape(1, 576, 512, INT8, values_in_keys=True)
    with pytest.raises(ValueError, match="8 bits"):
        NormRopeWrite(PoolShape(8, 64, 64, INT8), F16, 8, rotary_dim=64)
    with pytest.raises(ValueError, match="latent"):
        NormRopeWrite(PoolShape(1, 576, 512, F16, values_in_keys=True), F16, 8, rotary_dim=64)
    with pytest.raises(ValueError, match="to a pool of 8 bits only"):
        KVWrite(pool, INT8)
    with pytest.raises(ValueError, match="66 of 64 dims"):
        NormRopeWrite(pool, F16, 8, rotary_dim=66)
