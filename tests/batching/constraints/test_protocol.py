"""What may follow."""

import numpy as np

from batching.constraints.protocol import AllowedTokens, MaskRow
from batching.request import BatchRequest
from batching.scheduler import ContinuousBatchingScheduler
from batching.scheduling.outputs import RequestFailure, RequestOutput
from batching.steps.token_output import FinishReason
from tests.support.fakes import TokenRunner, expected_output, small_config
from tests.support.requests import make_request


def test_a_mask_has_a_bit_for_each_allowed_token() -> None:
    row = np.full(3, -1, np.int32)
    allowed = AllowedTokens([0, 31, 32, 95, 31])
    allowed.fill_mask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == [0, 31, 32, 95]
    allowed.accept(31)
    assert not allowed.is_complete
    assert allowed.error is None
    assert allowed.matcher() is allowed
    assert allowed == AllowedTokens([95, 0, 31, 32])


class Script:
    """Is complete after some tokens, or fails there."""

    num_free = 0

    def __init__(self, length: int, failure: str | None = None) -> None:
        self._length = length
        self._failure = failure
        self.taken: list[int] = []
        self.matchers: list[Script] = []

    @property
    def is_complete(self) -> bool:
        return self._failure is None and len(self.taken) >= self._length

    @property
    def error(self) -> str | None:
        return self._failure if len(self.taken) >= self._length else None

    def fill_mask(self, row: MaskRow) -> None:
        row[:] = -1

    def accept(self, token_id: int) -> None:
        self.taken.append(token_id)

    def matcher(self) -> "Script":
        self.matchers.append(Script(self._length, self._failure))
        return self.matchers[-1]


def serve(request: BatchRequest) -> list[RequestOutput | RequestFailure]:
    scheduler = ContinuousBatchingScheduler(small_config(max_draft_tokens=7))
    runner = TokenRunner(scheduler.config)
    scheduler.add(request)
    items: list[RequestOutput | RequestFailure] = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert not any(s.drafts for s in plan.slices)
        items += scheduler.update(plan, runner.run(plan))
    assert scheduler.stats().num_free_blocks == scheduler.config.num_blocks
    return items


def test_a_completion_ends_where_nothing_may_follow() -> None:
    request = make_request(0, [1, 2, 3], max_tokens=9, constraint=Script(2))
    fork = request.fork(1)
    serve(request)
    expected = expected_output([1, 2, 3], 2)
    for each in (request, fork):
        assert each.output_token_ids == expected
        assert each.finish_reason is FinishReason.STOP
    assert isinstance(request.spec.constraint, Script)
    assert [each.taken for each in request.spec.constraint.matchers] == [expected, expected]


def test_a_constraint_that_fails_ends_its_request_only() -> None:
    items = serve(make_request(0, [1, 2, 3], max_tokens=9, constraint=Script(2, "too complex")))
    first, last = items
    assert isinstance(first, RequestOutput)
    assert isinstance(last, RequestFailure)
    assert str(last.error) == "too complex"
