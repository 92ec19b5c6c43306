"""The steps of the first rank, at the others."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from batching.constraints.grammar import Grammar
from batching.constraints.grammar_text import GrammarText
from batching.constraints.protocol import AllowedTokens
from batching.errors import RankLost
from batching.inputs.sampling_params import SamplingParams
from batching.pooling import PoolingParams
from batching.ranks.lockstep import Lockstep, follow, without_outputs
from batching.steps.codec import InvalidPlan, encode
from batching.steps.sequences import Sequences
from batching.steps.step_plan import StepPlan
from tests.support.rank_links import Linked, linked
from tests.support.requests import make_request, plan_of


class Steps:
    """A `Follower` that notes what it does."""

    def __init__(self) -> None:
        self.found: list[StepPlan | str] = []

    def follow(self, plan: StepPlan) -> None:
        self.found.append(plan)

    def reset(self) -> None:
        self.found.append("reset")


@contextmanager
def following() -> Iterator[tuple[Lockstep, Linked, Steps, Future[None]]]:
    """Yield rank 0's side, and what another one does and how it ends."""
    steps = Steps()
    with linked(2) as links, ThreadPoolExecutor(1) as threads:
        ends = threads.submit(follow, links.members[0], steps)
        try:
            yield Lockstep(links.leader), links, steps, ends
        finally:
            links.leader.close()


PLAN = plan_of(make_request(1, [5, 6], max_tokens=3), ended=(8,))


def test_others_follow_in_order_until_the_end() -> None:
    with following() as (lockstep, _, steps, ends):
        lockstep.begin(PLAN)
        lockstep.computed()
        lockstep.reset()
        lockstep.begin(StepPlan((), ended=(1,)))
        lockstep.computed()
        lockstep.end()
        assert ends.result(timeout=30) is None
    assert steps.found == [without_outputs(PLAN), "reset", StepPlan((), ended=(1,))]


def test_a_plan_for_others_has_the_same_rows_and_nothing_to_sample_with() -> None:
    request = make_request(
        1,
        range(100),
        max_tokens=9,
        sampling=SamplingParams(logprobs=3, seed=7),
        constraint=AllowedTokens([1]),
    )
    pooled = make_request(2, range(7), max_tokens=0, pooling=PoolingParams())
    plan = plan_of(request, pooled)
    sent = without_outputs(plan)
    assert sent.slices == plan.slices
    states = Sequences().begin(sent)
    assert states[1].matcher is None
    assert states[1].sampling == SamplingParams(temperature=0.0)
    assert states[2].spec.pooling == PoolingParams()
    assert states[2].num_prompt_tokens == 7
    assert len(encode(sent)) < len(encode(plan)) < 2000


def test_an_error_within_a_step_ends_what_the_ranks_do_together() -> None:
    with following() as (lockstep, _, steps, ends):
        lockstep.begin(PLAN)
        error = ValueError("no\nroom")
        with pytest.raises(
            RankLost, match="rank 0 cannot compute a step with the others: ValueError: no room"
        ):
            lockstep.check(error)
        with pytest.raises(RankLost, match="rank 0 could not compute a step"):
            ends.result(timeout=30)
        assert steps.found == [without_outputs(PLAN)]
        # Nothing is sent any more that another rank could read within its step.
        lockstep.end()


def test_an_error_after_a_step_is_one_of_its_requests() -> None:
    with following() as (lockstep, _, _, ends):
        lockstep.begin(PLAN)
        lockstep.computed()
        lockstep.check(ValueError("of a request"))
        lockstep.end()
        ends.result(timeout=30)


def test_a_lost_rank_is_named_and_not_told_anything() -> None:
    with following() as (lockstep, links, _, ends):
        links.members[0].end(RankLost(1, "is full"))
        with pytest.raises(RankLost):
            ends.result(timeout=30)
        links.leader_ends.wait()
        with pytest.raises(RankLost, match="rank 1 is full") as caught:
            lockstep.begin(PLAN)
        lockstep.check(caught.value)
        with pytest.raises(RankLost, match="rank 1 is full"):
            lockstep.check(RuntimeError("[ring] connection to a peer was lost"))
        lockstep.computed()
        lockstep.end()


@pytest.mark.parametrize(
    "plan",
    [
        b"xyz",
        encode(
            plan_of(make_request(1, [5], max_tokens=3, constraint=Grammar(GrammarText("x"), ())))
        ),
    ],
)
def test_other_messages_are_no_plans(plan: bytes) -> None:
    with following() as (_, links, _, ends):
        links.leader.send(b"S" + plan)
        with pytest.raises(InvalidPlan):
            ends.result(timeout=30)
