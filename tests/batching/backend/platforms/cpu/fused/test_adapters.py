"""A half of a block, for rows with adapters, computes what it would with W + B A in place of W."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np
import pytest

from batching.backend.platforms.cpu.native_loader import Native
from tests.support.native_adapters import adapted, change, double, is_close, random

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
