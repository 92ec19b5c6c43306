"""The sampler against numpy, row by row and in mixtures."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from batching.backend.platforms.cpu.sampling import native_draw
from batching.backend.sampling.logit_rows import Sample
from batching.backend.sampling.logprobs import token_logprobs
from batching.backend.sampling.sampler import Draw, Sampler, draw_on_device, draw_on_host
from batching.backend.sampling.seeds import draw_seed
from batching.backend.sampling.token_masks import MaskFiller
from batching.constraints.protocol import AllowedTokens, MaskRow
from batching.inputs.sampling_params import SamplingParams
from batching.request import BatchRequest
from tests.support.requests import make_request, respec, states_of

VOCAB_SIZE = 32
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=VOCAB_SIZE).astype(np.float32) * 3


IDS = count()


def request(
    prompt: list[int] | None = None, output: list[int] | None = None, **params: Any
) -> BatchRequest:
    params.setdefault("seed", 0)
    made = make_request(next(IDS), prompt or [0], max_tokens=999, sampling=SamplingParams(**params))
    for token in output or []:
        made.append(token)
    return made


@pytest.fixture(scope="module", autouse=True, params=["device", "host", "native"])
def draw(request: pytest.FixtureRequest) -> Iterator[None]:
    """Draw in all ways; with Hypothesis a fixture has to last for the module."""
    if request.param == "native":
        Drawing.means = native_draw(request.getfixturevalue("native").module)
    else:
        Drawing.means = draw_on_device if request.param == "device" else draw_on_host
    yield
    Drawing.means = None


class Drawing:
    means: Draw | None = None


def new_sampler() -> Sampler:
    return Sampler(Drawing.means)


def samples(requests: Sequence[BatchRequest]) -> list[Sample]:
    return [Sample(r.request_id, r.num_tokens) for r in requests]


def sample(*requests: BatchRequest, logits: np.ndarray[Any, Any] = LOGITS) -> list[int]:
    rows = mx.array(np.tile(logits, (len(requests), 1)))
    tokens, chosen = new_sampler().sample(rows, samples(requests), states_of(requests))
    token_ids: list[int] = np.array(tokens).tolist()
    assert np.array(chosen).tolist() == logits[token_ids].tolist()
    return token_ids


def draws(num: int = 400, *, logits: np.ndarray[Any, Any] = LOGITS, **params: Any) -> Counter[int]:
    return Counter(sample(*(request(seed=s, **params) for s in range(num)), logits=logits))


def probabilities(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    exponentials = np.exp(logits - logits.max())
    return np.asarray(exponentials / exponentials.sum())


def test_temperature_zero_takes_the_most_likely_token() -> None:
    assert sample(request(temperature=0.0)) == [int(LOGITS.argmax())]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_those_of_the_distribution(temperature: float) -> None:
    counts = draws(2000, temperature=temperature)
    expected = probabilities(LOGITS / temperature)
    actual = np.array([counts[t] for t in range(VOCAB_SIZE)]) / counts.total()
    assert np.abs(actual - expected).max() < 0.04


@pytest.mark.parametrize("top_k", [1, 3, VOCAB_SIZE, 1000])
def test_top_k_leaves_the_k_most_likely(top_k: int) -> None:
    assert set(draws(top_k=top_k, temperature=5.0)) == set(np.argsort(-LOGITS)[:top_k].tolist())


@pytest.mark.parametrize("top_p", [0.0, 0.01, 0.5, 0.9, 0.999])
def test_top_p_leaves_the_smallest_set_that_reaches_p(top_p: float) -> None:
    order = np.argsort(-LOGITS)
    chances = probabilities(LOGITS)[order]
    num_kept = int((np.cumsum(chances) < top_p).sum()) + 1
    sampled = set(draws(top_p=top_p))
    assert sampled <= set(order[:num_kept].tolist())
    # What is kept with some probability also comes up.
    assert sampled >= set(order[:num_kept][chances[:num_kept] > 0.01].tolist())


@pytest.mark.parametrize("params", [{"top_k": 40}, {"top_k": 1}, {"top_k": 40, "top_p": 0.9}])
def test_top_k_holds_at_the_size_of_a_real_vocabulary(params: dict[str, Any]) -> None:
    """Sums of 49152 probabilities round, and ties are common in half precision."""
    logits = RNG.normal(size=49152).astype(np.float16).astype(np.float32)
    sampled = draws(20, temperature=2.0, **params, logits=logits)
    assert min(logits[token] for token in sampled) >= np.sort(logits)[-params["top_k"]]
    assert len(sampled) <= params["top_k"]


@pytest.mark.parametrize("top_p", [0.5, 0.95])
def test_top_p_reaches_as_far_as_it_must_in_a_flat_distribution(top_p: float) -> None:
    """Further than the most probable thousand tokens of a real vocabulary."""
    logits = np.linspace(0.1, 0.0, 49152).astype(np.float32)
    num_kept = int((np.cumsum(probabilities(logits.astype(np.float64))) < top_p).sum()) + 1
    sampled = draws(30, top_p=top_p, logits=logits)
    assert 0.8 * num_kept < max(sampled) < 1.01 * num_kept


def test_of_equal_logits_only_as_many_stay_as_there_is_room_for() -> None:
    logits = np.array([2.0, 5.0, 5.0, 5.0], dtype=np.float32)
    assert len(draws(200, top_k=1, logits=logits)) == 1
    assert len(draws(200, top_k=2, logits=logits)) == 2


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-6, 1e-5, 1e-3])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    assert set(draws(20, temperature=temperature)) == {int(LOGITS.argmax())}


def test_top_p_is_taken_of_what_top_k_left() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    params: dict[str, Any] = {"top_k": 2, "top_p": 0.55}
    # Of the two that top-k leaves, the first has 4/7 > 0.55 of the mass.
    assert {sample(request(seed=s, **params), logits=logits)[0] for s in range(50)} == {0}


@pytest.mark.parametrize("num_deviations", [0.1, 1.0, 1.5])
@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_top_n_sigma_leaves_what_is_within_deviations_of_the_highest(
    num_deviations: float, temperature: float
) -> None:
    allowed = np.flatnonzero(LOGITS.max() - num_deviations * LOGITS.std() <= LOGITS)
    sampled = draws(top_n_sigma=num_deviations, temperature=temperature)
    assert set(sampled) <= set(allowed.tolist())
    if temperature > 1:
        assert set(sampled) == set(allowed.tolist())


def test_banned_tokens_do_not_count_for_top_n_sigma() -> None:
    """One of them at minus a billion would make the deviation so large that all remain."""
    words = tuple((token,) for token in range(8))
    left = LOGITS[8:]
    allowed = 8 + np.flatnonzero(left >= left.max() - left.std())
    sampled = draws(top_n_sigma=1.0, temperature=5.0, bad_words=words)
    assert set(sampled) == set(allowed.tolist())


def test_top_n_sigma_of_logits_that_are_not_finite_gives_a_token() -> None:
    logits = mx.array(np.where(np.arange(VOCAB_SIZE) == 3, np.inf, LOGITS)[None])
    rows = [request(top_n_sigma=1.0)]
    tokens, _ = new_sampler().sample(logits, samples(rows), states_of(rows))
    assert 0 <= int(np.array(tokens)[0]) < VOCAB_SIZE


def test_rows_without_top_n_sigma_keep_all_beside_one_with_it() -> None:
    pairs = [request(seed=s, temperature=9.0, top_n_sigma=s % 2 * 0.01) for s in range(300)]
    sampled = sample(*pairs)
    assert set(sampled[1::2]) == {int(LOGITS.argmax())}
    assert len(set(sampled[::2])) > VOCAB_SIZE // 2


def test_min_p_leaves_what_is_likely_enough_beside_the_most_likely() -> None:
    chances = probabilities(LOGITS)
    allowed = np.flatnonzero(chances >= 0.1 * chances.max() * 0.999)
    assert set(draws(min_p=0.1)) == set(allowed.tolist())


def test_a_bias_bans_and_forces() -> None:
    best = int(LOGITS.argmax())
    banned = request(temperature=0.0, logit_bias=((best, -100.0),))
    forced = request(temperature=1.0, logit_bias=((7, 100.0),))
    assert sample(banned, forced) == [int(np.argsort(-LOGITS)[1]), 7]


def penalised(logits: np.ndarray[Any, Any], r: BatchRequest) -> np.ndarray[Any, Any]:
    """The definitions, one token at a time."""
    out = logits.astype(np.float64).copy()
    for token in set(r.token_ids):
        factor = r.spec.sampling.repetition_penalty
        out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
    for token, times in Counter(r.output_token_ids).items():
        out[token] -= r.spec.sampling.presence_penalty + times * r.spec.sampling.frequency_penalty
    for token, bias in r.spec.sampling.logit_bias:
        out[token] += bias
    return out


tokens = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.builds(
            request,
            prompt=tokens,
            output=tokens,
            temperature=st.just(0.0),
            presence_penalty=st.sampled_from([0.0, 1.0, -2.0]),
            frequency_penalty=st.sampled_from([0.0, 0.5, 2.0]),
            repetition_penalty=st.sampled_from([1.0, 1.5, 0.7]),
            logit_bias=st.sampled_from([(), ((3, 4.0),), ((0, -100.0), (5, 2.5))]),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_penalties_are_those_of_the_definitions_in_any_mixture(rows: list[BatchRequest]) -> None:
    logits = np.stack([np.roll(LOGITS, i) for i in range(len(rows))])
    sampler, states = new_sampler(), states_of(rows)
    # Twice: the second time the counts are kept from the first.
    for _ in range(2):
        got = np.array(sampler.sample(mx.array(logits), samples(rows), states)[0]).tolist()
        assert got == [int(penalised(logits[i], r).argmax()) for i, r in enumerate(rows)]
        for r, token in zip(rows, got, strict=True):
            r.append(token)
            states[r.request_id].append(token)


def test_a_draw_depends_on_seed_and_position_and_not_on_the_neighbours() -> None:
    mine = request(seed=5, prompt=[1, 2], temperature=1.5, top_p=0.95)
    alone = sample(mine)
    others = [request(seed=s, temperature=t) for s in range(4) for t in (0.0, 0.7)]
    assert sample(*others, mine, request(top_k=2))[len(others)] == alone[0]


def test_positions_and_seeds_draw_unlike_numbers() -> None:
    seen = {draw_seed(seed, position) for seed in range(50) for position in range(50)}
    assert len(seen) == 2500
    assert all(0 <= each < 1 << 64 for each in seen)
    assert draw_seed(-1, 3) == draw_seed(2**64 - 1, 3)


def test_half_precision_logits_are_sampled_in_single_precision() -> None:
    logits = mx.array(LOGITS)[None].astype(mx.bfloat16)
    rows = [request(temperature=0.0)]
    tokens, _ = new_sampler().sample(logits, samples(rows), states_of(rows))
    assert np.array(tokens).tolist() == [int(np.array(logits.astype(mx.float32)).argmax())]


class Fixed:
    """A constraint that never changes."""

    is_complete = False
    error = None
    num_free = 0

    def __init__(self, allowed: set[int]) -> None:
        self._allowed = allowed

    def fill_mask(self, row: MaskRow) -> None:
        AllowedTokens(self._allowed).fill_mask(row)

    def accept(self, token_id: int) -> None:
        """It never changes."""

    def matcher(self) -> "Fixed":
        return self


def constrained(allowed: set[int], **params: Any) -> BatchRequest:
    return respec(request(**params), constraint=Fixed(allowed))


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_a_constraint_leaves_what_it_allows_and_no_neighbour_notices(temperature: float) -> None:
    allowed = set(np.argsort(LOGITS)[:3].tolist())
    rows = [
        request(seed=9),
        *(constrained(allowed, seed=s, temperature=temperature) for s in range(300)),
    ]
    logits = mx.array(np.tile(LOGITS, (len(rows), 1)))
    states = states_of(rows)
    masks = MaskFiller(VOCAB_SIZE).start(samples(rows), states)
    sampled = np.array(new_sampler().sample(logits, samples(rows), states, masks)[0]).tolist()
    assert sampled[0] == sample(request(seed=9))[0]
    best = max(allowed, key=lambda token: LOGITS[token])
    assert set(sampled[1:]) == ({best} if temperature == 0 else allowed)


def test_without_constraints_there_are_no_masks() -> None:
    row = request()
    assert MaskFiller(VOCAB_SIZE).start(samples([row]), states_of([row])) is None


def test_where_a_mask_leaves_only_what_must_not_come_the_mask_counts() -> None:
    end = constrained({3}, temperature=0.0, min_tokens=5)
    states = states_of([respec(end, stop_token_ids=frozenset({3}))])
    masks = MaskFiller(VOCAB_SIZE).start(samples([end]), states)
    tokens, _ = new_sampler().sample(mx.array(LOGITS[None]), samples([end]), states, masks)
    assert np.array(tokens) == [3]


def test_no_stop_token_comes_before_min_tokens() -> None:
    best, second = np.argsort(-LOGITS)[:2].tolist()
    early = request(output=[5], temperature=0.0, min_tokens=2)
    late = request(output=[5, 5], temperature=0.0, min_tokens=2)
    for each in (early, late):
        respec(each, stop_token_ids=frozenset({best}))
    assert sample(early, late) == [second, best]


def test_a_bad_word_is_never_completed() -> None:
    best, second = np.argsort(-LOGITS)[:2].tolist()
    params: dict[str, Any] = {"temperature": 0.0, "bad_words": ((7, 8, best), (9,))}
    begun = request(output=[1, 7, 8], **params)
    other = request(output=[7, 8, 1], **params)
    # Tokens of the prompt are not output.
    asked = request(prompt=[7, 8], **params)
    short = request(temperature=0.0, bad_words=((best,),), logit_bias=((best, 100.0),))
    assert sample(begun, other, asked, short) == [second, best, best, second]


@pytest.mark.parametrize(
    "params",
    [
        {"frequency_penalty": 2.0},
        {"presence_penalty": 2.0, "logit_bias": ((3, 1.5), (4, -2.0))},
        {"repetition_penalty": 1.8},
        {"bad_words": ((5, 6, 2), (6, 1), (8,))},
        {"min_tokens": 4},
    ],
)
def test_after_drafts_a_token_is_sampled_as_after_the_same_output(params: dict[str, Any]) -> None:
    def tokens(output: list[int], drafts: tuple[int, ...] = ()) -> list[int]:
        requests = [request(output=output, seed=seed, **params) for seed in range(50)]
        for r in requests:
            respec(r, stop_token_ids=frozenset(np.argsort(-LOGITS)[:3].tolist()))
        rows = mx.array(np.tile(LOGITS, (50, 1)))
        after = [Sample(r.request_id, r.num_tokens + len(drafts), drafts) for r in requests]
        sampled: list[int] = np.array(
            new_sampler().sample(rows, after, states_of(requests))[0]
        ).tolist()
        return sampled

    assert tokens([5], (6, 5, 6)) == tokens([5, 6, 5, 6])


def test_log_probabilities_are_those_of_the_model() -> None:
    logits = np.stack([LOGITS, np.roll(LOGITS, 1)])
    expected = np.log(probabilities(logits[0].astype(np.float64)))
    order = np.argsort(-LOGITS)
    first, second = token_logprobs(logits, [4, 5], [3, 0])
    assert first.logprob == pytest.approx(expected[4], abs=1e-5)
    assert [token for token, _ in first.top] == order[:3].tolist()
    assert [each for _, each in first.top] == pytest.approx(expected[order[:3]].tolist(), abs=1e-5)
    assert second.logprob == pytest.approx(expected[4], abs=1e-5)
    assert second.top == ()


@pytest.mark.parametrize("token_id", [4, 2])
def test_named_tokens_have_log_probabilities_beside_the_sampled_one(token_id: int) -> None:
    expected = np.log(probabilities(LOGITS.astype(np.float64)))
    (named,) = token_logprobs(LOGITS[None], [token_id], [(7, 2)])
    tokens = [token for token, _ in named.top]
    assert sorted(tokens) == sorted({token_id, 7, 2})
    assert [each for _, each in named.top] == pytest.approx(expected[tokens].tolist(), abs=1e-5)


def test_rounding_does_not_change_a_draw() -> None:
    """Logits of another batch differ in the last digits; what is sampled from them must not."""
    logits = (3 * RNG.normal(size=49152)).astype(np.float32)
    rounded = logits * (1 + RNG.normal(size=49152).astype(np.float32) * np.float32(1e-6))
    rows = [request(seed=seed, temperature=1.0) for seed in range(100)]
    assert sample(*rows, logits=logits) == sample(*rows, logits=rounded)
