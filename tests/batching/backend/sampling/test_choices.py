"""Typical-p, XTC, the order of the temperature and its range, against their definitions in numpy."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from batching.backend.platforms.cpu.sampling import native_draw
from batching.backend.sampling.host_draw import NEVER
from batching.backend.sampling.sampler import Draw, draw_on_device, draw_on_host
from batching.backend.sampling.seeds import applies_xtc
from batching.inputs.sampling_params import SamplingParams

LOGITS = np.array([4.0, 3.5, 3.0, 2.0, 1.0, 0.0, -1.0, -3.0])
NUM_DRAWS = 160


class Drawing:
    means: Draw


@pytest.fixture(scope="module", autouse=True, params=["device", "host", "native"])
def draw(request: pytest.FixtureRequest) -> None:
    """Draw in all ways; with Hypothesis a fixture has to last for the module."""
    if request.param == "native":
        Drawing.means = native_draw(request.getfixturevalue("native").module)
    else:
        Drawing.means = draw_on_device if request.param == "device" else draw_on_host


def sampled(
    logits: np.ndarray[Any, Any], params: Sequence[SamplingParams], seeds: Sequence[int]
) -> list[int]:
    rows = mx.array(np.tile(logits.astype(np.float32), (len(params), 1)))
    tokens: list[int] = np.array(
        Drawing.means(rows, params, seeds, [None] * len(params), None)
    ).tolist()
    return tokens


def draws(
    num: int = NUM_DRAWS, *, logits: np.ndarray[Any, Any] = LOGITS, **params: Any
) -> Counter[int]:
    return Counter(sampled(logits, [SamplingParams(**params)] * num, range(num)))


def probabilities(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def smallest_set(chances: np.ndarray[Any, Any], order: Sequence[int], limit: float) -> list[int]:
    """Return the first tokens that reach the limit together, at least one."""
    kept: list[int] = []
    for token in order:
        if kept and chances[kept].sum() >= limit:
            break
        kept.append(token)
    return kept


def kept(logits: np.ndarray[Any, Any], params: SamplingParams) -> set[int]:
    """The definitions, in llama.cpp's order and with its XTC, each of what the one before has left."""
    left = np.full(len(logits), -np.inf)

    def only(tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        left[:] = -np.inf
        left[tokens] = logits[tokens]
        return probabilities(left)

    chances = only(np.argsort(-logits, kind="stable")[: params.top_k or len(logits)].tolist())
    some = np.flatnonzero(chances).tolist()
    if params.typical_p < 1:
        entropy = -sum(chances[t] * np.log(chances[t]) for t in some)
        order = sorted(some, key=lambda t: abs(-np.log(chances[t]) - entropy))
        chances = only(smallest_set(chances, order, params.typical_p))
    if params.top_p < 1:
        chances = only(smallest_set(chances, np.argsort(-chances).tolist(), params.top_p))
    chances = only(
        np.flatnonzero((chances > 0) & (chances >= params.min_p * chances.max())).tolist()
    )
    result = np.flatnonzero(chances).tolist()
    top = sorted(
        (t for t in result if chances[t] >= params.xtc_threshold), key=lambda t: chances[t]
    )
    return set(result) - (set(top[1:]) if params.xtc_probability else set())


@settings(deadline=None, max_examples=60)
@given(
    st.permutations([0.0, 1.1, 2.3, 2.9, 3.2, 4.4, 4.9, 5.3]),
    st.builds(
        SamplingParams,
        top_k=st.sampled_from([0, 3, 6]),
        typical_p=st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]),
        top_p=st.sampled_from([0.6, 0.93, 1.0]),
        min_p=st.sampled_from([0.0, 0.07, 0.41]),
        xtc_probability=st.sampled_from([0.0, 1.0]),
        xtc_threshold=st.sampled_from([0.01, 0.1, 0.3, 0.6]),
        temperature=st.just(90.0),
        temperature_last=st.just(True),
    ),
)
def test_what_is_kept_is_that_of_the_definitions(
    logits: list[float], params: SamplingParams
) -> None:
    """At a temperature so high that all that is kept is sampled, one as often as the other."""
    expected = kept(np.array(logits), params)
    assert set(sampled(np.array(logits), [params] * NUM_DRAWS, range(NUM_DRAWS))) == expected


def test_a_temperature_that_comes_first_changes_what_is_kept() -> None:
    """Hot, all tokens are probable enough; before, only the first three are."""
    params: dict[str, Any] = {"temperature": 90.0, "min_p": 0.3}
    assert set(draws(**params)) == set(range(8))
    assert set(draws(**params, temperature_last=True)) == {0, 1, 2}
    assert set(draws(**params, temperature_last=True, top_n_sigma=0.3)) == {0, 1}


def test_a_temperature_that_comes_last_changes_how_often() -> None:
    counts = draws(2000, temperature=0.5, temperature_last=True, top_k=3)
    expected = probabilities(LOGITS[:3] / 0.5)
    assert np.abs([counts[t] / 2000 for t in range(3)] - expected).max() < 0.04


def test_top_choices_are_left_out_as_often_as_asked() -> None:
    """Of the three that reach the threshold the least probable remains, with what does not."""
    counts = draws(2000, xtc_probability=0.4, xtc_threshold=0.1)
    without = probabilities(np.where(np.arange(8) < 2, -np.inf, LOGITS))
    expected = 0.6 * probabilities(LOGITS) + 0.4 * without
    assert np.abs([counts[t] / 2000 for t in range(8)] - expected).max() < 0.04
    applied = sum(applies_xtc(0.4, seed) for seed in range(5000))
    assert abs(applied / 5000 - 0.4) < 0.03
    assert not applies_xtc(0.0, 0)
    assert all(applies_xtc(1.0, seed) for seed in range(100))


def test_one_top_choice_stays_even_if_it_is_the_only_token() -> None:
    assert set(draws(20, xtc_probability=1.0, top_k=1)) == {0}


def heated(logits: np.ndarray[Any, Any], low: float, high: float, exponent: float) -> float:
    chances = probabilities(logits)
    entropy = -(chances * np.log(chances)).sum() / np.log(len(logits))
    return float(low + (high - low) * entropy**exponent)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("width", "exponent"), [(0.5, 1.0), (2.0, 3.0), (1.0, 0.5)])
def test_a_dynamic_temperature_follows_the_entropy(
    width: float, exponent: float, *, last: bool
) -> None:
    params: dict[str, Any] = {
        "dynatemp_range": width,
        "dynatemp_exponent": exponent,
        "temperature_last": last,
    }
    counts = draws(3000, temperature=1.0, **params, top_k=4 if last else 0)
    logits = LOGITS[:4] if last else LOGITS
    temperature = heated(logits, max(0.0, 1 - width), 1 + width, exponent)
    expected = probabilities(logits / temperature)
    assert np.abs([counts[t] / 3000 for t in range(len(logits))] - expected).max() < 0.035


def test_where_a_token_is_certain_a_range_down_to_zero_is_greedy() -> None:
    certain = np.where(np.arange(8) == 5, 40.0, 0.0)
    assert set(draws(50, logits=certain, temperature=1.0, dynatemp_range=1.0)) == {5}


def test_banned_tokens_do_not_count_for_a_dynamic_temperature() -> None:
    """Two tokens of the same probability are as uncertain as it gets, whatever else is banned."""
    logits = np.where(np.arange(8) < 2, 1.0, NEVER)
    logits[1] = 0.0
    params: dict[str, Any] = {"temperature": 1.0, "dynatemp_range": 1.0}
    temperature = heated(logits[:2], 0.0, 2.0, 1.0)
    counts = draws(2000, logits=logits, **params)
    assert abs(counts[0] / 2000 - probabilities(logits[:2] / temperature)[0]) < 0.04


@pytest.mark.parametrize("fill", [np.inf, np.nan])
def test_logits_that_are_not_finite_give_a_token(fill: float) -> None:
    params = SamplingParams(
        typical_p=0.5, xtc_probability=1.0, dynatemp_range=1.0, temperature_last=True
    )
    first = SamplingParams(typical_p=0.5, xtc_probability=1.0, dynatemp_range=1.0)
    tokens = sampled(np.where(LOGITS == 3, fill, LOGITS), [params, first], [1, 2])
    assert all(0 <= token < 8 for token in tokens)


MIXTURE = [
    SamplingParams(),
    SamplingParams(temperature=0.0, xtc_probability=1.0),
    SamplingParams(typical_p=0.4),
    SamplingParams(top_k=5, top_p=0.9, typical_p=0.8),
    SamplingParams(top_p=0.9, min_p=0.1),
    SamplingParams(xtc_probability=0.5, xtc_threshold=0.05),
    SamplingParams(temperature=1.7, temperature_last=True, min_p=0.1),
    SamplingParams(dynatemp_range=0.7, dynatemp_exponent=2.0),
    SamplingParams(dynatemp_range=0.7, temperature_last=True, top_n_sigma=1.0),
]


def test_no_row_depends_on_its_neighbours() -> None:
    seeds = range(100, 100 + 12 * len(MIXTURE))
    params = MIXTURE * 12
    together = sampled(LOGITS, params, seeds)
    alone = [sampled(LOGITS, [p], [seed])[0] for p, seed in zip(params, seeds, strict=True)]
    assert together == alone
    assert together[1 :: len(MIXTURE)] == [0] * 12
