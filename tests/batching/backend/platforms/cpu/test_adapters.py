"""Rows with adapters are multiplied with W + B A, and all other rows as if there were none."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from batching.backend.platforms.cpu.native_loader import Native
from tests.support.native_adapters import adapted, change, double, is_close, random


@pytest.fixture
def kernels(native: Native) -> Any:
    return native.module


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("inputs", [1, 60, 576, 2100])
def test_products_of_mixed_rows(
    kernels: Any, rng: np.random.Generator, dtype: mx.Dtype, inputs: int
) -> None:
    plain = [random(rng, outputs, inputs) for outputs in (100, 1, 64)]
    weights = [kernels.pack(weight) for weight in plain]
    ranks = [(8, 1, 16), (512, 3)]  # of the adapters' layers; the second has not the last one
    changes = [
        [change(rng, weight, rank, dtype) for weight, rank in zip(plain, each, strict=False)]
        for each in ranks
    ]
    adapters = [
        kernels.adapter([(w, a, b) for w, (a, b) in zip(weights, each, strict=False)])
        for each in changes
    ]
    segments = [(2, None), (17, adapters[0]), (1, adapters[1]), (3, None), (4, adapters[0])]
    of_row = [adapters.index(x) if x else None for count, x in segments for _ in range(count)]
    for per_row in (1, 3):
        x = random(rng, len(of_row), per_row, inputs)
        bias = random(rng, 100)
        before = kernels.linear(x, weights, [bias, None, None])
        with adapted(kernels, segments):
            outputs = kernels.linear(x, weights, [bias, None, None])
        for layer, (y, unchanged) in enumerate(zip(outputs, before, strict=True)):
            expected = double(x) @ double(plain[layer]).T
            expected += double(bias) if layer == 0 else 0
            for m, index in enumerate(of_row):
                if index is None or layer >= len(changes[index]):
                    assert mx.array_equal(y[m], unchanged[m])
                else:
                    a, b = changes[index][layer]
                    expected[m] += double(x[m]) @ double(a) @ double(b)
            is_close(y, expected)
    assert [adapter.touched() for adapter in adapters] == [[0, 1, 2], [0, 1]]


def test_the_same_weights_twice_in_one_operation(kernels: Any, rng: np.random.Generator) -> None:
    weight, x = random(rng, 40, 32), random(rng, 3, 32)
    weights = kernels.pack(weight)
    a, b = change(rng, weight, 4)
    with adapted(kernels, [(3, kernels.adapter([(weights, a, b)]))]):
        outputs = kernels.linear(x, [weights, weights], [None, None])
    for y in outputs:
        is_close(y, double(x) @ (double(weight).T + double(a) @ double(b)))


@pytest.mark.parametrize("input_bits", [16, 32])
def test_changes_of_quantized_weights_are_of_inputs_before_rounding(
    native: Native, rng: np.random.Generator, input_bits: int
) -> None:
    if native.min_input_bits > input_bits:
        pytest.skip("this processor has no products of integers")
    weight = random(rng, 96, 128)
    weights = native.module.pack(*mx.quantize(weight, group_size=32), 4, input_bits)
    if native.min_input_bits == 8 and input_bits == 16:
        native.module.scale_inputs([weights], bytes(i % 3 for i in range(128)))
    a, b = change(rng, weight, 8)
    adapter = native.module.adapter([(weights, a, b)])
    x = random(rng, 7, 128)
    before = native.module.linear(x, [weights], [None])[0]
    with adapted(native.module, [(7, adapter)]):
        y = native.module.linear(x, [weights], [None])[0]
    is_close(y, double(before) + double(x) @ double(a) @ double(b))


def test_no_bit_of_a_row_depends_on_other_rows_or_threads(
    native: Native, rng: np.random.Generator
) -> None:
    kernels = native.module
    plain = [random(rng, outputs, 1100) for outputs in (70, 96)]
    weights = [kernels.pack(weight) for weight in plain]
    adapters = [
        kernels.adapter([(w, *change(rng, p, rank)) for w, p in zip(weights, plain, strict=True)])
        for rank in (5, 16)
    ]
    of_row = [adapters[i // 13 % 2] if i % 7 else None for i in range(60)]
    x = random(rng, 60, 1100)

    def run(first: int, end: int) -> list[mx.array]:
        with adapted(kernels, [(1, adapter) for adapter in of_row[first:end]]):
            outputs: list[mx.array] = kernels.linear(x[first:end], weights, [None, None])
        mx.eval(outputs)
        return outputs

    together = run(0, 60)
    try:
        for threads in (1, 3):
            kernels.set_num_threads(threads)
            for first, end in ((0, 60), (0, 1), (13, 17), (20, 53)):
                for part, whole in zip(run(first, end), together, strict=True):
                    assert mx.array_equal(part, whole[first:end])
    finally:
        kernels.set_num_threads(native.num_threads, native.nodes)


def test_an_operation_keeps_the_adapters_that_it_was_built_with(
    kernels: Any, rng: np.random.Generator
) -> None:
    weight = random(rng, 8, 16)
    weights = kernels.pack(weight)
    a, b = change(rng, weight, 2)
    adapter = kernels.adapter([(weights, a, b)])
    assert adapter.nbytes > 0
    rows = kernels.adapted_rows([(1, None), (2, adapter)])
    assert rows.num_rows == 3
    x = random(rng, 3, 16)
    assert kernels.use_adapters(rows) is None
    y = kernels.linear(x, [weights], [None])[0]
    with ThreadPoolExecutor(1) as other:
        assert other.submit(kernels.use_adapters, None).result() is None
    assert kernels.use_adapters(None).num_rows == 3
    assert kernels.use_adapters(None) is None
    assert adapter.touched() == []
    del adapter, rows, weights
    expected = double(x) @ double(weight).T
    expected[1:] += double(x[1:]) @ double(a) @ double(b)
    is_close(y, expected)


def test_the_largest_output_is_that_with_the_adapter(
    kernels: Any, rng: np.random.Generator
) -> None:
    weight = random(rng, 300, 32)
    weights = kernels.pack(weight)
    a, b = change(rng, weight, 4)
    x = random(rng, 6, 32)
    with adapted(kernels, [(6, kernels.adapter([(weights, a, 9 * b)]))]):
        indices, values = kernels.arg_max(kernels.linear(x, [weights], [None])[0])
    expected = double(x) @ (double(weight).T + 9 * double(a) @ double(b))
    assert indices.tolist() == expected.argmax(axis=1).tolist()
    is_close(values, expected.max(axis=1))


def test_what_does_not_fit_is_named(kernels: Any, rng: np.random.Generator) -> None:
    weights = kernels.pack(random(rng, 6, 10))
    a, b = mx.zeros((10, 2)), mx.zeros((2, 6))
    good = (weights, a, b)
    for bad, message in (
        (
            (weights, b, a),
            r"layer 1: a \[2, 6\] and b \[10, 2\] are not \[10, rank\] and \[rank, 6",
        ),
        ((weights, a, mx.zeros((3, 6))), r"layer 1: a \[10, 2\] and b \[3, 6\]"),
        ((weights, mx.zeros((10,)), b), r"a \[10\]"),
        ((weights, mx.zeros((10, 513)), mx.zeros((513, 6))), "rank is 513 and not from 1 to 512"),
        ((weights, mx.zeros((10, 0)), mx.zeros((0, 6))), "rank is 0"),
        (good, "layer 1: the weights are those of an earlier layer"),
        ((kernels.pack(random(rng, 2, 6, 10)), a, b), "layer 1: the weights are several matrices"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.adapter([good, bad])
    with pytest.raises(ValueError, match="one row"):
        kernels.adapted_rows([(0, None)])


def test_inputs_have_as_many_rows_for_each_row_of_the_step(
    kernels: Any, rng: np.random.Generator
) -> None:
    changed, other = (kernels.pack(random(rng, 6, 10)) for _ in range(2))
    adapter = kernels.adapter([(changed, mx.zeros((10, 2)), mx.zeros((2, 6)))])
    with adapted(kernels, [(2, None), (2, adapter)]):
        for count in (1, 3, 6):
            with pytest.raises(ValueError, match=f"{count} rows .* 4 rows"):
                kernels.linear(mx.zeros((count, 10)), [changed], [None])
            # What the adapters do not change may be of any rows.
            mx.eval(kernels.linear(mx.zeros((count, 10)), [other], [None]))
