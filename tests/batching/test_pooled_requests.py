"""Requests that get a vector: right in any batch, in any chunks, after any preemption."""

from collections.abc import Sequence

import pytest

from batching.pooling import PoolingParams, PoolingType
from batching.request import BatchRequest
from batching.steps.token_output import FinishReason, TokenOutput
from tests.support.fakes import expected_output, expected_vector, make_engine, small_config
from tests.support.requests import make_request

PROMPT = [7, 3, 11, 40, 2, 9, 9, 1, 30, 22, 5]
LAST, CLS, MEAN = (PoolingParams(type=kind) for kind in PoolingType)


def pooled(request_id: int, prompt: Sequence[int], params: PoolingParams) -> BatchRequest:
    return make_request(request_id, prompt, max_tokens=0, pooling=params)


def run(requests: Sequence[BatchRequest], **changes: object) -> dict[int, list[TokenOutput]]:
    scheduler, engine = make_engine(small_config(**changes))
    outputs: dict[int, list[TokenOutput]] = {r.request_id: [] for r in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for request_id, output in engine.step():
            assert isinstance(output, TokenOutput)
            outputs[request_id].append(output)
    assert scheduler.stats().num_free_blocks == scheduler.config.num_blocks
    return outputs


@pytest.mark.parametrize("params", [LAST, CLS, MEAN, PoolingParams(dimensions=2, normalize=False)])
@pytest.mark.parametrize("prefill_chunk", [1, 3, 4, 100])
def test_a_request_gets_one_vector_and_no_tokens(params: PoolingParams, prefill_chunk: int) -> None:
    (output,) = run([pooled(0, PROMPT, params)], prefill_chunk=prefill_chunk)[0]
    assert output.token_ids == ()
    assert output.finish_reason is FinishReason.STOP
    assert output.embedding is not None
    assert list(output.embedding) == expected_vector(PROMPT, params)


def test_vectors_and_tokens_come_from_the_same_steps() -> None:
    others = [make_request(i, [i, 4, 8], max_tokens=6) for i in (3, 4, 5)]
    vectors = [pooled(i, PROMPT[i:], p) for i, p in enumerate((LAST, CLS, MEAN))]
    outputs = run([others[0], *vectors, *others[1:]])
    for request, params in zip(vectors, (LAST, CLS, MEAN), strict=True):
        (output,) = outputs[request.request_id]
        assert list(output.embedding or ()) == expected_vector(PROMPT[request.request_id :], params)
    for other in others:
        tokens = [t for output in outputs[other.request_id] for t in output.token_ids]
        assert tokens == expected_output([other.request_id, 4, 8], 6)


def test_the_prefix_cache_serves_the_last_token_and_all_others_compute_every_row() -> None:
    _, engine = make_engine(small_config())
    cached = []
    for request_id, params in enumerate((MEAN, LAST, CLS, MEAN)):
        engine.add(pooled(request_id, PROMPT, params))
        while engine.has_work:
            for _, output in engine.step():
                assert isinstance(output, TokenOutput)
                assert list(output.embedding or ()) == expected_vector(PROMPT, params)
                cached.append(output.num_cached_tokens)
    assert cached == [0, 8, 0, 0]


@pytest.mark.parametrize("params", [LAST, CLS, MEAN])
def test_a_preempted_request_is_pooled_from_its_beginning(params: PoolingParams) -> None:
    prompt = [*PROMPT, *PROMPT]
    # The first grows while it decodes, and takes the blocks of those that still read.
    growing = [make_request(i, [i + 1] * 5, max_tokens=24) for i in range(2)]
    requests = [*growing, *(pooled(10 + i, [i, *prompt], params) for i in range(3))]
    outputs = run(requests, num_blocks=14, prefill_chunk=2, max_num_batched_tokens=6)
    for i in range(3):
        (output,) = outputs[10 + i]
        assert list(output.embedding or ()) == expected_vector([i, *prompt], params)
    assert sum(outputs[10 + i][0].num_preemptions for i in range(3))


def test_progress_comes_before_the_vector() -> None:
    request = make_request(0, PROMPT, max_tokens=0, pooling=LAST, reports_progress=True)
    outputs = run([request], prefill_chunk=4)[0]
    assert [output.is_progress for output in outputs] == [True] * (len(outputs) - 1) + [False]
    assert len(outputs) > 1
