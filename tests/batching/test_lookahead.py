"""Steps that are planned and queued while the one before them runs."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from batching.batch_inference import BatchInferenceEngine
from batching.config import SchedulerConfig
from batching.constraints.protocol import AllowedTokens
from batching.inputs.sampling_params import SamplingParams
from batching.pooling import PoolingParams
from batching.priority_queue import Priority
from batching.prompt_lookup import PromptLookup
from batching.request import BatchRequest
from batching.scheduler import ContinuousBatchingScheduler
from batching.scheduling.outputs import RequestFailure
from batching.steps.model_runner import SlicesFailed
from batching.steps.step_plan import SliceOutput, StepPlan
from tests.support.block_stores import FakeStore
from tests.support.fakes import (
    FakeClock,
    TokenRunner,
    expected_output,
    request,
    right,
    small_config,
)
from tests.support.pipelined import Pipelined, QueuedPlan
from tests.support.requests import make_request
from tests.support.thinking import byte_budget

LIMITS = small_config(max_num_seqs=4, max_num_batched_tokens=16, num_blocks=32)


class Watched(Pipelined):
    """Keeps the plans, with a mark at those that were queued behind another one, and may fail."""

    def __init__(self, runner: TokenRunner) -> None:
        super().__init__(runner)
        self.plans: list[str] = []
        self.fail: Callable[[StepPlan], None] = lambda _: None

    def submit(self, plan: StepPlan, after: QueuedPlan | None = None) -> QueuedPlan:
        self.plans.append(f"{'+ ' if after is not None else ''}{plan}")
        self.fail(plan)
        return super().submit(plan, after)


class FailingRunner(TokenRunner):
    """Loses the pool in steps with a request that decodes at some position."""

    def __init__(
        self,
        config: SchedulerConfig,
        position: int,
        error: Exception | None = None,
        store: FakeStore | None = None,
    ) -> None:
        super().__init__(config, store)
        self._position = position
        self._error = error or RuntimeError("injected")
        self.num_resets = -1

    def run(self, plan: StepPlan) -> list[SliceOutput]:
        outputs = super().run(plan)
        if any(s.sequence_id == 0 and s.start == self._position for s in plan.slices):
            self._pool = [255] * len(self._pool)
            raise self._error
        return outputs


class Server:
    """An engine that queues steps."""

    def __init__(
        self,
        config: SchedulerConfig = LIMITS,
        runner: TokenRunner | None = None,
        store: FakeStore | None = None,
    ) -> None:
        self.scheduler = ContinuousBatchingScheduler(config, store)
        tokens = runner or TokenRunner(config)
        self.pipeline = Watched(tokens)
        self.clock = FakeClock()
        self.engine = BatchInferenceEngine(
            self.scheduler, tokens, clock=self.clock, pipeline=self.pipeline
        )
        self.failed: set[int] = set()

    def serve(self, *requests: BatchRequest, num_steps: int = 1000) -> list[str]:
        """Add requests and run some steps; return the plans of these."""
        for r in requests:
            self.engine.add(r, *r.forks)
        first = len(self.pipeline.plans)
        while self.engine.has_work and num_steps:
            num_steps -= 1
            items = self.engine.step()
            self.failed |= {item.request_id for item in items if isinstance(item, RequestFailure)}
        if not self.engine.has_work:
            assert self.scheduler.stats().num_free_blocks == self.scheduler.config.num_blocks
        return self.pipeline.plans[first:]


def test_each_step_is_queued_behind_the_one_before() -> None:
    """And none for a request whose last token is on its way."""
    server, r = Server(), request(0, 5, 4)
    assert server.serve(r) == ["0[0:5]", "+ 0[5:6]", "+ 0[6:7]", "+ 0[7:8]"]
    assert right(r)


def test_prompts_come_in_behind_a_step_too() -> None:
    server, first, second = Server(small_config()), request(0, 3, 6), request(1, 9, 2)
    lines = server.serve(first, num_steps=1) + server.serve(second)
    assert lines == [
        "0[0:3]",
        "+ 0[3:4]",
        "+ 0[4:5] 1[0:7]",
        "+ 0[5:6] 1[7:9]",
        "+ 0[6:7] 1[9:10]",
        "+ 0[7:8]",
    ]
    assert right(first) and right(second)


def test_a_stop_token_costs_a_row_of_the_next_step() -> None:
    stop = expected_output([0, 0, 1], 8)[2]
    server = Server()
    r, other = request(0, 3, 8, stop_token_ids={stop}), request(1, 3, 5)
    assert server.serve(r, other)[2:5] == [
        "+ 0[4:5] 1[4:5]",
        "+ 0[5:6] 1[5:6]",
        "+ 1[6:7]",
    ]
    assert r.output_token_ids == expected_output([0, 0, 1], 3)
    assert right(other)


@pytest.mark.parametrize("num_checkpoints", [None, 4])
def test_what_was_planned_ahead_is_cached_by_its_tokens(num_checkpoints: int | None) -> None:
    """The hash of a block is not that of one whose last token was unknown."""
    server = Server(replace(LIMITS, num_checkpoints=num_checkpoints))
    r = request(0, 5, 12)
    server.serve(r)
    again = make_request(1, [*r.token_ids[:-1], 1], max_tokens=1)
    server.serve(again)
    assert again.num_cached_tokens == 16


def test_an_aborted_request_has_no_blocks_while_its_row_is_in_flight() -> None:
    server, r, other = Server(), request(0, 5, 9), request(1, 6, 9)
    server.serve(r, other, num_steps=3)
    server.engine.abort(0)
    assert not len(r.block_table)
    server.serve(request(2, 9, 3))
    assert right(other)


NOT_FOLLOWED: dict[str, dict[str, Any]] = {
    "a constraint": {"constraint": AllowedTokens(range(64))},
    "log probabilities": {"sampling": SamplingParams(temperature=0.0, logprobs=0)},
    "log probabilities of the prompt": {
        "sampling": SamplingParams(temperature=0.0, prompt_logprobs=0)
    },
    "a vector": {"pooling": PoolingParams()},
}


@pytest.mark.parametrize("kind", NOT_FOLLOWED)
def test_some_steps_are_read_before_the_next_is_planned(kind: str) -> None:
    server = Server()
    options = NOT_FOLLOWED[kind]
    lines = server.serve(request(0, 5, 0 if kind == "a vector" else 4, **options), request(1, 4, 3))
    assert not lines[1].startswith("+"), lines


def test_only_the_end_of_a_thought_waits_for_the_steps_before() -> None:
    """Four tokens of it, four bytes that are forced, and the first ones of an answer."""
    server = Server()
    budget = byte_budget(4, begun=b"<t>", is_first_only=True)
    lines = server.serve(request(0, 5, 14, constraint=budget))
    assert [line.startswith("+") for line in lines] == (
        [False, False, True, True] + 4 * [False] + [False, False] + 4 * [True]
    )


def test_forks_are_made_before_the_next_step_is_planned() -> None:
    server, r = Server(), request(0, 5, 3)
    fork = r.fork(1)
    assert server.serve(r) == ["0[0:5]&1", "0[5:6] 1[5:6] 1>17", "+ 0[6:7] 1[6:7]"]
    assert right(r) and right(fork)


@pytest.mark.parametrize("is_fork", [False, True])
def test_a_prompt_with_forks_may_lose_some_while_it_is_in_flight(is_fork: bool) -> None:
    server, first, r = Server(small_config()), request(5, 3, 9), request(0, 5, 3)
    forks = [r.fork(1), r.fork(2)]
    server.serve(first, num_steps=1)
    server.engine.add(r, *forks)
    while not any("&1&2" in line for line in server.pipeline.plans):
        server.serve(num_steps=1)
    assert server.pipeline.plans[-1].startswith("+")
    server.engine.abort(1 if is_fork else 0)
    server.serve()
    ended = (r, forks[1]) if is_fork else forks
    assert all(map(right, (first, *ended)))


def test_where_a_request_may_be_preempted_nothing_is_planned_ahead() -> None:
    server = Server(small_config(num_blocks=4, max_num_seqs=2))
    requests = [request(0, 7, 6), request(1, 5, 5)]
    lines = server.serve(*requests)
    assert any("-1" in line for line in lines)
    assert not any("-1" in line and line.startswith("+") for line in lines)
    assert all(map(right, requests))


def test_a_best_effort_request_in_flight_keeps_its_room_when_another_is_admitted() -> None:
    """One that was due later, and ends with the token that is on its way."""
    server, prompt = Server(small_config(num_blocks=6)), [1, 0]
    stop = expected_output(prompt, 3)[2]
    waits = request(0, 20, 2, priority=Priority.LOW, is_best_effort=True)
    r = request(1, 2, 6, stop_token_ids={stop}, is_best_effort=True)
    lines = server.serve(waits, r, request(2, 11, 1, is_best_effort=True))
    assert lines[:5] == ["1[0:2] 2[0:6]", "+ 1[2:3] 2[6:11]", "+ 1[3:4]", "+ 1[4:5]", "0[0:8]"]
    assert not server.failed
    assert r.output_token_ids == expected_output(prompt, 3) and right(waits)


class NeverDrafts(PromptLookup):
    def may_draft(self, token_ids: Sequence[int]) -> bool:
        return False


@pytest.mark.parametrize("may_draft", [False, True])
def test_where_a_draft_may_follow_the_token_is_read_first(may_draft: bool) -> None:
    server = Server(small_config(max_draft_tokens=3))
    # Tokens of which there is one kind: whatever follows has been there.
    r = make_request(0, [7] * 6, max_tokens=3)
    if not may_draft:
        r.drafter = NeverDrafts()
    assert [line.startswith("+") for line in server.serve(r)][1] != may_draft


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(0, 8))
def test_what_may_be_drafted_is_known_before_the_token(tokens: list[int], pause: int) -> None:
    drafter = PromptLookup()
    if pause:
        drafter.record(pause, 2, 0)
    may_draft = drafter.may_draft(tokens)
    drafts = [any(_drafts([*tokens, token], pause)) for token in range(4)]
    assert may_draft >= any(drafts)


def _drafts(tokens: Sequence[int], pause: int) -> Iterable[int]:
    drafter = PromptLookup()
    if pause:
        drafter.record(pause, 2, 0)
    return (token + 1 for token in drafter.draft(tokens, 4))


def test_nothing_may_be_drafted_where_nothing_was_said_before() -> None:
    assert not PromptLookup().may_draft(range(100))


def test_a_step_that_fails_with_another_behind_it_fails_its_own_requests() -> None:
    server = Server(runner=FailingRunner(LIMITS, 6))
    requests = [request(0, 5, 6), request(1, 3, 9), request(2, 30, 2)]
    server.serve(requests[0], requests[1], num_steps=2)
    lines = server.serve(requests[2])
    assert lines[0].startswith("+ 0[7:8]"), "queued behind the step that fails"
    assert server.failed == {0, 1}
    # It came in with the step behind, and starts over.
    assert right(requests[2]) and requests[2].num_preemptions == 1


def test_who_expects_a_token_of_a_step_that_fails_for_another_one_starts_over() -> None:
    server = Server(runner=FailingRunner(LIMITS, 6, SlicesFailed([0])))
    other = request(1, 3, 9)
    lines = server.serve(request(0, 5, 6), other)
    assert lines[3:5] == ["+ 0[7:8] 1[5:6]", "1[0:5]"]
    assert server.failed == {0}
    assert right(other) and other.num_preemptions == 1


def test_what_a_step_that_fails_has_stored_is_stored_once() -> None:
    store = FakeStore()
    server = Server(runner=FailingRunner(LIMITS, 7, store=store), store=store)
    server.serve(request(0, 5, 6), num_steps=1)
    # Storing has its share of this time.
    server.clock.now += 1
    assert server.serve() == ["+ 0[6:7]", "0[7:8] 0>block", "+ 0[8:9]"]
    assert server.failed == {0}
    assert [e.contents for e in store.entries.values()] == [[bytes([0, 0, 1, 2])]]


def test_a_step_that_cannot_be_queued_fails_after_the_one_before_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server()
    r, other = request(0, 5, 6), request(1, 3, 9)

    def fail(plan: StepPlan) -> None:
        if "0[7:8]" in str(plan):
            raise SlicesFailed([0])

    server.pipeline.fail = fail
    with caplog.at_level(logging.CRITICAL):
        server.serve(r, other)
    assert server.failed == {0}
    assert r.output_token_ids == expected_output([0, 0, 1, 2, 3], 3)
    assert right(other)


def test_a_step_in_flight_can_be_waited_for() -> None:
    server = Server()
    server.serve(request(0, 5, 6), num_steps=2)
    assert server.engine.has_work
    server.engine.drain()
    server.engine.abort(0)
    assert not server.engine.has_work
    server.engine.drain()
