"""The steps of the first rank, at the others."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from batching.batch_inference import BatchInferenceEngine
from batching.block_manager import BlockTable
from batching.config import SchedulerConfig
from batching.constraints.grammar import Grammar
from batching.constraints.grammar_text import GrammarText
from batching.constraints.protocol import AllowedTokens
from batching.errors import RankLost
from batching.inputs.sampling_params import SamplingParams
from batching.pooling import PoolingParams
from batching.ranks.lockstep.steps import Lockstep, follow, without_outputs
from batching.ranks.lockstep.tables import LatestTables
from batching.scheduler import ContinuousBatchingScheduler
from batching.steps.codec import InvalidPlan, encode
from batching.steps.sequences import Sequences
from batching.steps.step_plan import Slice, SliceOutput, StepPlan
from tests.support.fakes import TokenRunner
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


def test_tables_are_sent_when_they_have_changed() -> None:
    table, windows = BlockTable(range(0, 4000, 2)), BlockTable([7, 9])

    def decode(position: int, *, ended: tuple[int, ...] = ()) -> StepPlan:
        blocks = table.value, windows.value
        return StepPlan((Slice(3, position, (position,), *blocks, num_samples=1),), ended=ended)

    plans = [decode(1), decode(2)]
    table.extend([5])
    windows.drop(1)
    plans += [decode(3), decode(4), decode(5, ended=(3,)), decode(6)]
    sent, found = LatestTables(), LatestTables()
    reduced = [sent.without_unchanged(plan) for plan in plans]
    assert [found.with_unchanged(plan) for plan in reduced] == plans
    sizes = [len(encode(plan)) for plan in reduced]
    assert [size < 300 for size in sizes] == [False, True, False, True, False, True]
    sent.forget()
    assert sent.without_unchanged(plans[-1]) == plans[-1]


def test_random_plans_arrive_as_they_were_sent_also_after_a_reset() -> None:
    config = SchedulerConfig(num_blocks=12, block_size=4, max_num_seqs=3, max_draft_tokens=3)
    with following() as (lockstep, _, steps, ends):
        runner = Led(config, lockstep)
        engine = BatchInferenceEngine(ContinuousBatchingScheduler(config), runner)
        for i in range(6):
            engine.add(make_request(i, [i + 1] * (3 * i + 2), max_tokens=12))
        while engine.has_work:
            engine.step()
        lockstep.end()
        ends.result(timeout=30)
    assert engine.stats().num_preemptions
    assert len(runner.sent) > 10
    assert steps.found == runner.sent


class Led(TokenRunner):
    """A runner of rank 0; it fails once, so that it is reset in the middle."""

    def __init__(self, config: SchedulerConfig, lockstep: Lockstep) -> None:
        self.sent: list[StepPlan | str] = []
        self._lockstep: Lockstep | None = None
        super().__init__(config)
        self._lockstep = lockstep

    def run(self, plan: StepPlan) -> list[SliceOutput]:
        assert self._lockstep is not None
        self._lockstep.begin(plan)
        self.sent.append(without_outputs(plan))
        self._lockstep.computed()
        if len(self.sent) == 5:
            raise RuntimeError("once")
        return super().run(plan)

    def reset(self) -> None:
        super().reset()
        if self._lockstep is not None:
            self._lockstep.reset()
            self.sent.append("reset")


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
