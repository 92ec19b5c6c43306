"""DRY against its definition, looked up for each position and length."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from batching.backend.sampling.dry import MAX_GROWTH, Repetitions
from batching.backend.sampling.host_draw import NEVER
from batching.backend.sampling.logit_rows import Sample
from batching.backend.sampling.sampler import Sampler
from batching.inputs.sampling_params import DryParams, SamplingParams
from tests.support.requests import make_request, states_of


def defined(dry: DryParams, tokens: Sequence[int]) -> dict[int, float]:
    """Return the penalty of each token: the definition."""
    window = list(tokens if dry.last_n is None else tokens[-dry.last_n :])
    unbroken = 0
    while unbroken < len(window) and not ends_broken(dry, window[: len(window) - unbroken]):
        unbroken += 1
    longest: dict[int, int] = {}
    for end in range(1, len(window)):
        for n in range(min(end, unbroken) + 1):
            if n >= dry.allowed_length and window[end - n : end] == window[len(window) - n :]:
                longest[window[end]] = max(n, longest.get(window[end], 0))
    return {
        token: min(dry.multiplier * dry.base ** (n - dry.allowed_length), -NEVER)
        for token, n in longest.items()
        if token not in dry.breakers
    }


def ends_broken(dry: DryParams, tokens: Sequence[int]) -> bool:
    return tokens[-1] in dry.breakers or any(
        tuple(tokens[-len(each) :]) == each for each in dry.breaker_sequences
    )


def found(repetitions: Repetitions) -> dict[int, float]:
    tokens, terms = repetitions.penalties()
    assert len(set(tokens.tolist())) == len(tokens)
    return dict(zip(tokens.tolist(), (-terms).tolist(), strict=True))


token_ids = st.integers(0, 4)


@settings(deadline=None, max_examples=300)
@given(
    st.builds(
        DryParams,
        multiplier=st.sampled_from([0.8, 5.0]),
        base=st.sampled_from([1.0, 1.75, 50.0]),
        allowed_length=st.integers(0, 4),
        last_n=st.sampled_from([None, None, 1, 2, 7]),
        breakers=st.frozensets(st.integers(3, 4), max_size=1),
        breaker_sequences=st.sampled_from([(), ((0, 1),), ((2, 0), (1, 1, 0))]),
    ),
    st.lists(token_ids, min_size=1, max_size=30),
    st.lists(token_ids, max_size=12),
    st.lists(token_ids, max_size=3),
)
def test_penalties_are_those_of_the_definition(
    dry: DryParams, prompt: list[int], output: list[int], drafts: list[int]
) -> None:
    repetitions, tokens = Repetitions(dry, prompt), [*prompt]
    for token in (None, *output):
        tokens += [] if token is None else [token]
        repetitions.catch_up(tokens)
        assert found(repetitions) == pytest.approx(defined(dry, tokens))
        drafted = found(repetitions.followed_by(drafts))
        assert drafted == pytest.approx(defined(dry, [*tokens, *drafts]))
    # As after a preemption: all tokens at once.
    assert found(Repetitions(dry, tokens)) == pytest.approx(defined(dry, tokens))


@pytest.mark.parametrize("base", [1.0, 1.001, 1.75, 1e3])
def test_a_long_repetition_is_penalised_as_much_as_a_ban(base: float) -> None:
    dry = DryParams(multiplier=0.8, base=base)
    repetitions, tokens = Repetitions(dry, [3] * 3000), [3] * 3000
    limit = min(0.8 * base**MAX_GROWTH if base < 2 else -NEVER, -NEVER)
    for _ in range(3):
        assert found(repetitions) == pytest.approx({3: limit})
        tokens.append(3)
        repetitions.catch_up(tokens)


def test_a_multiplier_of_next_to_nothing_is_one() -> None:
    assert found(Repetitions(DryParams(multiplier=5e-324, base=100.0), [3] * 9)) == {
        3: pytest.approx(0)
    }


def chosen(sampler: Sampler, request: Any, states: Any, drafts: tuple[int, ...] = ()) -> int:
    """Return what is sampled behind the tokens and the drafts, where 5 is the most probable and 6 is next."""
    logits = mx.array(np.array([[0, 0, 0, 0, 0, 3, 2, 0]], np.float32))
    made = Sample(request.request_id, request.num_tokens + len(drafts), drafts)
    return int(np.array(sampler.sample(logits, [made], states)[0])[0])


def test_the_sampler_penalises_what_goes_on_with_a_repetition() -> None:
    """Beside other edits, behind drafts, and as the output grows."""
    dry = DryParams(multiplier=9.0)
    sampling = SamplingParams(temperature=0.0, dry=dry, logit_bias=((5, 1.0),))
    request = make_request(0, [1, 2, 5, 3, 1], max_tokens=9, sampling=sampling)
    states, sampler = states_of([request]), Sampler()
    assert chosen(sampler, request, states) == 5
    assert chosen(sampler, request, states, (2,)) == 6
    assert chosen(sampler, request, states, (2, 5)) == 5
    states[0].append(2)
    request.append(2)
    assert chosen(sampler, request, states) == 6
    # Neither penalty is enough without the other.
    for penalty, token in ((0.0, 5), (0.4, 6)):
        both = SamplingParams(
            temperature=0.0, dry=DryParams(multiplier=0.7), presence_penalty=penalty
        )
        request = make_request(1, [1, 2, 5, 3], max_tokens=9, sampling=both)
        for each in (5, 1, 2):
            request.append(each)
        assert chosen(sampler, request, states_of([request])) == token
    unlike = SamplingParams(temperature=0.0, dry=dry)
    request = make_request(2, [1, 2, 5, 3], max_tokens=9, sampling=unlike)
    assert chosen(sampler, request, states_of([request])) == 5
