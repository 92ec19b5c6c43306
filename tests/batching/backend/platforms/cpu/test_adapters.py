"""Rows with adapters are computed with W + B A, and all other rows as if there were none."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from batching.backend.platforms.cpu.native_loader import Native

Doubles = npt.NDArray[np.float64]
Change = tuple[mx.array, mx.array]
Norm = tuple[list[float], float, bool, list[float]]

SIZE: Final = 48
HEADS: Final = 4
KEY_HEADS: Final = 2
DIM: Final = 16
NO_NORM: Final[Norm] = ([], 0.0, False, [])
# Rows of three requests, the second of which has no adapter.
REQUESTS: Final = (5, 3, 4)


@pytest.fixture
def kernels(native: Native) -> Any:
    return native.module


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


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


Run = Callable[[mx.array], mx.array]


@dataclass
class Half:
    """The shapes of a half's layers, and what makes an operation on rows of their weights."""

    shapes: list[tuple[int, int]]
    make: Callable[[Any, list[Any]], Run]


def layers(weights: list[Any]) -> list[tuple[Any, list[float]]]:
    return [(each, []) for each in weights]


def norm_of(size: int) -> Norm:
    return ([1 + 0.01 * i for i in range(size)], 1e-5, False, [])


def step_of(kernels: Any) -> Any:
    """The requests' rows, each from position 0 on in blocks of its own."""
    first = np.cumsum((0, *REQUESTS[:-1]))
    slices = [(row, n, 0, 2 * i, 0) for i, (row, n) in enumerate(zip(first, REQUESTS, strict=True))]
    slots = [8 * i + j for i, n in enumerate(REQUESTS) for j in range(n)]
    return kernels.step(
        np.array(slices, np.int32), np.arange(6, dtype=np.int32), np.array(slots, np.int32)
    )


def angles(kernels: Any, dims: int) -> tuple[mx.array, mx.array]:
    positions = mx.array([float(j) for n in REQUESTS for j in range(n)])
    frequencies = kernels.Frequencies([0.5**i for i in range(dims // 2)], 1.0)
    made: tuple[mx.array, mx.array] = kernels.angles(positions, frequencies)
    return made


def attention(is_joined: bool) -> Half:
    q, k = HEADS * DIM, KEY_HEADS * DIM
    inputs = [(q + 2 * k, SIZE)] if is_joined else [(q, SIZE), (k, SIZE), (k, SIZE)]

    def make(kernels: Any, weights: list[Any]) -> Run:
        norms = [norm_of(SIZE), norm_of(DIM), norm_of(DIM), NO_NORM, norm_of(SIZE)]
        half = kernels.attention(layers(weights), norms, HEADS, 0.25, residual=0.5)

        def run(x: mx.array) -> mx.array:
            pool = kernels.pool(6, 4, KEY_HEADS, DIM, DIM)
            y: mx.array = kernels.run_attention(
                x, *angles(kernels, DIM), False, half, pool, step_of(kernels)
            )
            return y

        return run

    return Half([*inputs, (SIZE, q)], make)


def latent(is_expanded: bool) -> Half:
    """Two layers of q; keys of a latent, of 32, and a rotated part, of 8."""
    kept, rotated, plain, rank = 32, 8, 16, 24
    query = plain + rotated
    shapes = [(rank, SIZE), (kept + rotated, SIZE), (HEADS * query, rank)]
    if is_expanded:
        shapes.append((HEADS * (plain + DIM), kept))

    def make(kernels: Any, weights: list[Any]) -> Run:
        rng = np.random.default_rng(1)
        heads = [kernels.pack(random(rng, HEADS, *s) * 0.2) for s in ((kept, plain), (DIM, kept))]
        norms = [norm_of(SIZE), norm_of(rank), norm_of(kept), NO_NORM]
        each = layers(weights)
        half = kernels.latent(
            each[:2], each[2:3], [] if is_expanded else heads, each[3:], norms, HEADS, 0.2, 1.0
        )

        def run(x: mx.array) -> mx.array:
            sizes = (HEADS, query, DIM) if is_expanded else (1, kept + rotated, kept)
            pool = kernels.pool(6, 4, *sizes, is_latent=not is_expanded)
            y: mx.array = kernels.run_latent(
                x, *angles(kernels, rotated), False, half, pool, step_of(kernels)
            )
            return y

        return run

    return Half([*shapes, (SIZE, HEADS * DIM)], make)


def mlp(is_joined: bool) -> Half:
    width = 80

    def make(kernels: Any, weights: list[Any]) -> Run:
        half = kernels.mlp(layers(weights), [norm_of(SIZE), norm_of(SIZE)], 0, 0.5)
        return lambda x: kernels.run_mlp(x, half, x + 1)

    inputs = [(2 * width, SIZE)] if is_joined else [(width, SIZE), (width, SIZE)]
    return Half([*inputs, (SIZE, width)], make)


def mixture() -> Half:
    experts, width = 3, 40

    def make(kernels: Any, weights: list[Any]) -> Run:
        rng = np.random.default_rng(1)
        shapes = ((width, SIZE), (width, SIZE), (SIZE, width))
        of_experts = [kernels.pack(random(rng, experts, *shape) * 0.2) for shape in shapes]
        gated = kernels.gated_experts(*(kernels.expert_layer(each) for each in of_experts))
        each = layers(weights)
        half = kernels.mixture(
            each[0],
            kernels.router(experts, experts, False),
            gated,
            [norm_of(SIZE), norm_of(SIZE)],
            kernels.mlp(each[1:4], [NO_NORM, NO_NORM]),
            each[4],
            1.0,
        )
        return lambda x: kernels.run_mixture(x, half)

    return Half([(experts, SIZE), (width, SIZE), (width, SIZE), (SIZE, width), (1, SIZE)], make)


def mixer(recurrence: str) -> Half:
    """A gated delta net, or a short convolution; all that a head has is in one layer, side by side."""
    heads, key = 2, 8 if recurrence == "delta" else 0
    widths = (key, key, DIM, DIM, 1, 1) if key else (0, 0, DIM, DIM, DIM, 0)
    first = [heads * int(n) for n in np.cumsum((0, *widths))]
    channels = heads * (2 * key + DIM)

    def make(kernels: Any, weights: list[Any]) -> Run:
        of_heads = [0.1] * heads if key else []
        made = kernels.mixer(
            layers(weights),
            [norm_of(SIZE), norm_of(DIM) if key else NO_NORM, NO_NORM],
            recurrence,
            [(0, at, width) for at, width in zip(first[:-1], widths, strict=True)],
            (heads, heads),
            (key, DIM),
            [0.2 + 0.001 * i for i in range(3 * channels)],
            decay=of_heads,
            dt_bias=of_heads,
            scales=(0.3, 0.5),
            eps=1e-6,
            norm_width=DIM if key else 0,
            residual=1.0,
        )
        rows = np.cumsum((0, *REQUESTS[:-1]))
        pieces = [(row, n, -1, i) for i, (row, n) in enumerate(zip(rows, REQUESTS, strict=True))]
        step = kernels.state_step(np.array(pieces, np.int32))
        return lambda x: kernels.run_mixer(x, made, made.pool(), step)

    return Half([(first[-1], SIZE), (SIZE, heads * DIM)], make)


HALVES: Final = {
    "attention": attention(is_joined=False),
    "joined attention": attention(is_joined=True),
    "latent": latent(is_expanded=False),
    "expanded latent": latent(is_expanded=True),
    "mlp": mlp(is_joined=False),
    "joined mlp": mlp(is_joined=True),
    "mixture": mixture(),
    "delta net": mixer("delta"),
    "short convolution": mixer("none"),
}


@pytest.mark.parametrize("name", HALVES)
def test_a_half_computes_with_changed_weights(
    kernels: Any, rng: np.random.Generator, name: str
) -> None:
    half = HALVES[name]
    plain = [random(rng, *shape) * shape[1] ** -0.5 for shape in half.shapes]
    weights = [kernels.pack(weight) for weight in plain]
    x = random(rng, sum(REQUESTS), 1, SIZE)
    changes = [[change(rng, weight, rank) for weight in plain] for rank in (3, 16)]
    adapters = [
        kernels.adapter([(w, a, b) for w, (a, b) in zip(weights, each, strict=True)])
        for each in changes
    ]
    run = half.make(kernels, weights)
    before = run(x)
    of_request = (adapters[0], None, adapters[1])
    with adapted(kernels, list(zip(REQUESTS, of_request, strict=True))):
        y = run(x)
    first, last = slice(0, REQUESTS[0]), slice(-REQUESTS[2], None)
    assert mx.array_equal(y[5:8], before[5:8])
    for rows, each in ((first, changes[0]), (last, changes[1])):
        merged = [
            double(weight) + (double(a) @ double(b)).T
            for weight, (a, b) in zip(plain, each, strict=True)
        ]
        expected = half.make(
            kernels, [kernels.pack(mx.array(w.astype(np.float32))) for w in merged]
        )
        is_close(y[rows], double(expected(x)[rows]), 2e-5)
        assert not np.allclose(double(y[rows]), double(before[rows]), atol=1e-2)
    assert [adapter.touched() for adapter in adapters] == [list(range(len(plain)))] * 2


def test_each_layer_of_a_half_is_changed_by_itself(kernels: Any, rng: np.random.Generator) -> None:
    for half in HALVES.values():
        plain = [random(rng, *shape) * shape[1] ** -0.5 for shape in half.shapes]
        weights = [kernels.pack(weight) for weight in plain]
        run, x = half.make(kernels, weights), random(rng, sum(REQUESTS), 1, SIZE)
        before = run(x)
        for weight, packed in zip(plain, weights, strict=True):
            adapter = kernels.adapter([(packed, *change(rng, weight, 4))])
            with adapted(kernels, [(sum(REQUESTS), adapter)]):
                y = run(x)
            assert not mx.array_equal(y, before)
            assert adapter.touched() == [0]


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
