from itertools import product

import pytest

from batching.inputs.sampling_params import SamplingParams
from batching.request import InvalidTransition, RequestStatus
from batching.steps.token_output import FinishReason
from tests.support.requests import make_request

LEGAL_MOVES = {
    "waiting -> prefilling",  # admitted
    "prefilling -> running",  # the whole prompt is computed
    "running -> completed",
    "prefilling -> waiting",  # preempted
    "running -> waiting",
    "waiting -> cancelled",  # aborted or failed
    "prefilling -> cancelled",
    "running -> cancelled",
}


@pytest.mark.parametrize(("old", "new"), list(product(RequestStatus, RequestStatus)))
def test_only_legal_moves_change_the_state(old: RequestStatus, new: RequestStatus) -> None:
    request = make_request(0, [1], max_tokens=1)
    request.status = old
    if f"{old} -> {new}" in LEGAL_MOVES:
        request.move_to(new)
        assert request.status is new
    else:
        with pytest.raises(InvalidTransition, match=f"request 0: {old} -> {new}"):
            request.move_to(new)
        assert request.status is old


@pytest.mark.parametrize("status", RequestStatus)
def test_a_request_has_ended_once_it_is_completed_or_cancelled(status: RequestStatus) -> None:
    request = make_request(0, [1], max_tokens=1)
    request.status = status
    assert request.has_ended == (status in (RequestStatus.COMPLETED, RequestStatus.CANCELLED))


def test_the_last_allowed_token_ends_a_request() -> None:
    request = make_request(0, [1, 2], max_tokens=2, stop_token_ids={9})
    request.append(3)
    assert request.finish_reason is None
    request.append(4)
    assert request.finish_reason is FinishReason.LENGTH
    assert request.output_token_ids == [3, 4]


def test_a_stop_token_ends_a_request_also_as_the_last_allowed_one() -> None:
    request = make_request(0, [1, 2], max_tokens=1, stop_token_ids={9})
    request.append(9)
    assert request.finish_reason is FinishReason.STOP


def test_a_stop_token_in_the_prompt_ends_nothing() -> None:
    assert make_request(0, [9], max_tokens=1, stop_token_ids={9}).finish_reason is None


def test_only_requests_without_a_seed_sample_differently() -> None:
    unseeded = {make_request(i, [1], max_tokens=1).seed for i in range(8)}
    assert len(unseeded) == 8
    seeded = SamplingParams(seed=0)
    assert make_request(0, [1], max_tokens=1, sampling=seeded).seed == 0


def test_repr_says_where_a_request_stands() -> None:
    assert repr(make_request(7, [1, 2], max_tokens=1)) == "BatchRequest(7 waiting, 0/2 tokens)"
