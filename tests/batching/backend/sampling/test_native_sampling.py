"""The kernel that samples, against numpy with the same random numbers."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.platforms.cpu.sampling import native_draw
from batching.backend.sampling.edits import Edits
from batching.inputs.sampling_params import SamplingParams

Array = NDArray[Any]
RunSample = Callable[..., list[int]]

MASK = 0xFFFFFFFF


@pytest.fixture
def sample(native: Native) -> RunSample:
    draw = native_draw(native.module)

    def run(logits: Array, params: list[SamplingParams], seeds: list[int]) -> list[int]:
        token_ids: list[int] = np.array(
            draw(mx.array(logits), params, seeds, [None] * len(seeds), None)
        ).tolist()
        return token_ids

    return run


def philox(numbers: Array, seed: int) -> Array:
    """The first word of Philox2x32-10 (Salmon et al. 2011)."""
    left, right = numbers.astype(np.uint64), np.full(len(numbers), seed >> 32, np.uint64)
    key = seed & MASK
    for _ in range(10):
        product = left * np.uint64(0xD256D193)
        left, right = (product >> np.uint64(32)) ^ np.uint64(key) ^ right, product & np.uint64(MASK)
        key = (key + 0x9E3779B9) & MASK
    return left


def test_the_reference_has_the_published_numbers() -> None:
    assert philox(np.array([0]), 0).tolist() == [0xFF1DAE59]
    assert philox(np.array([MASK]), (MASK << 32) | MASK).tolist() == [0x2C3F628B]


def reference(row: Array, params: SamplingParams, seed: int) -> list[int]:
    """Return the token, and the one that comes second."""
    logits, size = row.astype(np.float64), len(row)
    if params.temperature == 0:
        return [int(row.argmax())]
    if params.top_n_sigma:
        allowed = logits[logits > logits.max() - 5e8]
        floor = logits.max() - params.top_n_sigma * allowed.std()
        logits = np.where(logits < floor, -np.inf, logits)
    weights = np.exp((logits - logits.max()) / params.temperature)
    kept = np.lexsort((np.arange(size), -logits))[: params.top_k or size]
    if params.top_p < 1:
        sums = np.cumsum(weights[kept])
        kept = kept[: 1 + int(np.searchsorted(sums[:-1], params.top_p * sums[-1]))]
    kept = kept[weights[kept] >= params.min_p]
    uniform = (np.floor(philox(kept, seed) / 2) + 0.5) / 2**31
    speeds = weights[kept] / -np.log1p(-np.minimum(uniform, 1 - 2**-25))
    order: list[int] = kept[np.argsort(-speeds, kind="stable")][:2].tolist()
    return order


def random_params(rng: np.random.Generator) -> SamplingParams:
    return SamplingParams(
        temperature=float(rng.choice([0, 0.3, 1, 2.5])),
        top_k=int(rng.choice([0, 0, 1, 5, 40, 10_000])),
        top_p=float(rng.choice([1, 1, 0.95, 0.5, 0.01, 0])),
        min_p=float(rng.choice([0, 0, 0.05, 0.5, 1])),
        top_n_sigma=float(rng.choice([0, 0, 1, 2])),
    )


def random_logits(rng: np.random.Generator, num_rows: int, size: int) -> Array:
    logits = rng.normal(size=(num_rows, size)).astype(np.float32) * rng.choice([0.5, 3, 10])
    if rng.random() < 0.3:
        logits = np.round(logits)
    if rng.random() < 0.3:
        logits[:, rng.integers(size, size=size // 2)] = rng.choice([-np.inf, -1e9])
    logits[:, rng.integers(size)] = 1
    return np.asarray(logits)


@pytest.mark.parametrize("size", [1, 5, 16, 33, 1000, 49_152])
def test_it_is_numpy_with_the_same_numbers(sample: RunSample, size: int) -> None:
    rng = np.random.default_rng(size)
    for _ in range(8 if size > 1000 else 40):
        logits = random_logits(rng, 4, size)
        params = [random_params(rng) for _ in logits]
        seeds = [int(rng.integers(1 << 63)) for _ in logits]
        expected = [reference(*row)[0] for row in zip(logits, params, seeds, strict=True)]
        assert sample(logits, params, seeds) == expected


def test_a_row_depends_on_no_other(sample: RunSample) -> None:
    rng = np.random.default_rng(0)
    logits = random_logits(rng, 7, 2000)
    params = [random_params(rng) for _ in logits]
    alone = [sample(logits[i : i + 1], params[i : i + 1], [i])[0] for i in range(7)]
    assert sample(logits, params, list(range(7))) == alone


@pytest.mark.parametrize("worst", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_sampled(
    sample: RunSample, worst: float, temperature: float
) -> None:
    """The runner finds the request at fault by the logit of its token."""
    logits = np.zeros((1, 100), np.float32)
    logits[0, 70] = worst
    assert sample(logits, [SamplingParams(temperature=temperature)], [1]) == [70]


def test_logits_and_rows_are_as_many(native: Native) -> None:
    with pytest.raises(ValueError, match="rows, size"):
        native.module.sample(mx.zeros((2, 5)), [(1.0, 0, 1.0, 0.0, 0.0, 1)], [None])


@pytest.mark.parametrize("token", [-1, 5])
def test_a_token_that_is_not_in_the_vocabulary_is_not_written(native: Native, token: int) -> None:
    draw = native_draw(native.module)
    edits = Edits(np.array([token]), np.ones(1), np.zeros(1))
    with pytest.raises(IndexError, match="vocabulary"):
        draw(mx.zeros((1, 5)), [SamplingParams()], [0], [edits], None)
