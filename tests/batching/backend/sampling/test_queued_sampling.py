"""Tokens that are sampled behind one that a step in flight samples: it counts before it is known."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.platforms.cpu.sampling import native_sampler
from batching.backend.sampling.edits import Edits, penalties
from batching.backend.sampling.expected_tokens import SampledTokens
from batching.backend.sampling.logit_rows import Sample
from batching.backend.sampling.sampler import Sampler, draw_on_device, draw_on_host
from batching.inputs.sampling_params import SamplingParams
from batching.request import BatchRequest
from tests.support.host_kernels import host_kernel
from tests.support.requests import make_request, respec, states_of

Array = NDArray[Any]
NewSampler = Callable[[], Sampler]

VOCAB_SIZE: Final = 12
NUM_STEPS: Final = 6
NUM_REQUESTS: Final = 150


@pytest.fixture(params=["device", "native", "host"])
def new_sampler(request: pytest.FixtureRequest) -> NewSampler:
    if request.param == "native":
        module = request.getfixturevalue("native").module
        return lambda: native_sampler(module)
    draw = draw_on_device if request.param == "device" else draw_on_host
    return lambda: Sampler(draw)


def random_request(i: int, rng: np.random.Generator) -> BatchRequest:
    sampling = SamplingParams(
        temperature=float(rng.choice([0.0, 1.0])),
        repetition_penalty=float(rng.choice([1.0, 0.2, 3.0])),
        presence_penalty=float(rng.choice([0.0, -3.0, 2.0])),
        frequency_penalty=float(rng.choice([0.0, -1.5, 1.0])),
        logit_bias=[(), (), ((3, 2.5), (11, -4.0))][rng.integers(3)],
        min_tokens=int(rng.choice([0, 100])),
        seed=i,
    )
    prompt = rng.integers(0, 9, size=4).tolist()
    request = make_request(i, prompt, max_tokens=99, sampling=sampling, stop_token_ids={1, 5})
    for token in rng.integers(3, 12, size=int(rng.integers(0, 9))).tolist():
        request.token_ids.append(token)
    return request


def at_the_end(requests: Sequence[BatchRequest]) -> list[Sample]:
    return [Sample(r.request_id, r.num_tokens, (), r.expects_token) for r in requests]


def sampled(requests: Sequence[BatchRequest], tokens: mx.array) -> SampledTokens:
    index = {request.request_id: i for i, request in enumerate(requests)}
    return SampledTokens(tokens, mx.zeros(len(requests)), index)


def test_a_token_that_is_on_its_way_is_counted_as_one_that_is_known(
    new_sampler: NewSampler,
) -> None:
    rng = np.random.default_rng(1)
    requests = [random_request(i, rng) for i in range(600)]
    logits = mx.array(rng.normal(size=(600, VOCAB_SIZE)).astype(np.float32))
    last = rng.integers(0, VOCAB_SIZE, size=600)
    order = rng.permutation(600)
    in_flight = sampled([requests[i] for i in order], mx.array(last[order], mx.uint32))
    for r in requests:
        r.expect_token()
    lazily, _ = new_sampler().sample(
        logits, at_the_end(requests), states_of(requests), None, in_flight
    )
    for r, token in zip(requests, last.tolist(), strict=True):
        r.forget_expected()
        r.token_ids.append(token)
    known, _ = new_sampler().sample(logits, at_the_end(requests), states_of(requests))
    assert lazily.tolist() == known.tolist()


def serve(sampler: Sampler, *, queued: bool) -> list[list[int]]:
    """Return the outputs of requests after steps, each of some of them and in another order."""
    rng = np.random.default_rng(2)
    requests = [random_request(i, rng) for i in range(NUM_REQUESTS)]
    states = states_of(requests)
    in_flight = sampled([], mx.zeros(0, mx.uint32))

    def read() -> None:
        for each, token in zip(in_flight.indices, np.array(in_flight.tokens), strict=True):
            requests[each].forget_expected()
            requests[each].token_ids.append(int(token))
            states[each].append(int(token))

    for _ in range(NUM_STEPS):
        order = rng.permutation(NUM_REQUESTS)[: NUM_REQUESTS * 3 // 4]
        logits = mx.array(rng.normal(size=(len(order), VOCAB_SIZE)).astype(np.float32))
        rows = [requests[i] for i in order]
        if not queued:
            read()
        expected = in_flight if queued else None
        tokens, _ = sampler.sample(logits, at_the_end(rows), states, None, expected)
        if queued:
            read()
        in_flight = sampled(rows, tokens)
        if queued:
            for r in rows:
                r.expect_token()
    read()
    return [r.output_token_ids for r in requests]


def test_queued_steps_sample_what_others_do(new_sampler: NewSampler) -> None:
    assert serve(new_sampler(), queued=True) == serve(new_sampler(), queued=False)


def not_counted(edits: Edits) -> Edits:
    return edits._replace(expected=None)


def not_known(edits: Edits) -> Edits:
    """As if none of the tokens before were the same."""
    if edits.expected is None:
        return edits
    same = edits.expected._replace(factors=edits.factor, terms=edits.term)
    return edits._replace(expected=same)


@pytest.mark.parametrize("fault", [not_counted, not_known])
def test_a_token_that_is_not_counted_is_found(
    new_sampler: NewSampler, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Edits], Edits]
) -> None:
    expected = serve(new_sampler(), queued=False)
    monkeypatch.setattr(
        "batching.backend.sampling.sampler.penalties", lambda *args: fault(penalties(*args))
    )
    assert serve(new_sampler(), queued=False) == expected
    assert serve(new_sampler(), queued=True) != expected


@pytest.mark.parametrize("make", [native_sampler, lambda _: Sampler(draw_on_device)])
def test_nothing_waits_for_the_token(native: Native, make: Callable[[Any], Sampler]) -> None:
    num_read: list[int] = []

    def read(tokens: Array) -> Sequence[Array]:
        num_read.append(len(tokens))
        return [tokens]

    rng = np.random.default_rng(3)
    requests = [random_request(i, rng) for i in range(9)]
    for r in requests:
        respec(r, sampling=replace(r.spec.sampling, frequency_penalty=1.0))
        r.expect_token()
    last = mx.zeros(9, mx.uint32)
    [tokens] = host_kernel(native, read, [last], [last])
    logits = mx.array(rng.normal(size=(9, VOCAB_SIZE)).astype(np.float32))
    sampler = make(native.module)
    after, _ = sampler.sample(
        logits, at_the_end(requests), states_of(requests), None, sampled(requests, tokens)
    )
    assert not num_read
    mx.eval(after)
    assert num_read == [9]
