from collections.abc import Callable, Sequence

import pytest

from batching.batch_inference import BatchInferenceEngine
from batching.config import SchedulerConfig
from batching.constraints.protocol import AllowedTokens
from batching.errors import RankLost, RequestFailed
from batching.inputs.images import PlacedImage
from batching.request import BatchRequest
from batching.scheduler import ContinuousBatchingScheduler
from batching.scheduling.engine_turns import ALONE, Turn
from batching.scheduling.outputs import RequestFailure
from batching.steps.model_runner import SlicesFailed
from batching.steps.step_plan import SliceOutput, StepPlan
from tests.support.fakes import FakeClock, TokenRunner, expected_output, make_engine
from tests.support.requests import image_of, make_request

CONFIG = SchedulerConfig(num_blocks=16, block_size=4, max_num_seqs=2, max_num_batched_tokens=8)


class FailingRunner(TokenRunner):
    """Raises in chosen steps, after it has overwritten the pool."""

    def __init__(self, config: SchedulerConfig, should_fail: Callable[[StepPlan], bool]) -> None:
        super().__init__(config)
        self._should_fail = should_fail

    def run(self, plan: StepPlan) -> list[SliceOutput]:
        tokens = super().run(plan)
        if self._should_fail(plan):
            self._pool = [255] * len(self._pool)
            raise RuntimeError("out of memory")
        return tokens


def failing_engine(should_fail: Callable[[StepPlan], bool]) -> BatchInferenceEngine:
    scheduler = ContinuousBatchingScheduler(CONFIG)
    return BatchInferenceEngine(scheduler, FailingRunner(CONFIG, should_fail), clock=FakeClock())


def request(request_id: int, num_tokens: int = 5, max_tokens: int = 4) -> BatchRequest:
    return make_request(request_id, [request_id] * num_tokens, max_tokens=max_tokens)


def run(engine: BatchInferenceEngine) -> tuple[dict[int, list[int]], dict[int, Exception]]:
    outputs: dict[int, list[int]] = {}
    failures: dict[int, Exception] = {}
    while engine.has_work:
        for item in engine.step():
            if isinstance(item, RequestFailure):
                failures[item.request_id] = item.error
            else:
                outputs.setdefault(item.request_id, []).extend(item.output.token_ids)
    return outputs, failures


def test_a_failed_step_fails_its_own_requests_and_the_others_complete() -> None:
    engine = failing_engine(lambda plan: any(s.sequence_id == 1 for s in plan.slices))
    requests = [request(i) for i in range(4)]
    for r in requests:
        engine.add(r)
    outputs, failures = run(engine)
    # Request 0 was in the failing step; 2 and 3 waited for a sequence slot.
    assert set(failures) == {0, 1}
    assert all(isinstance(error, RequestFailed) for error in failures.values())
    assert outputs == {r.request_id: expected_output([r.request_id] * 5, 4) for r in requests[2:]}
    assert engine.stats().num_free_blocks == CONFIG.num_blocks


class Ended(TokenRunner):
    """What the runner is a part of has ended."""

    def run(self, plan: StepPlan) -> list[SliceOutput]:
        raise RankLost(1, "is gone")


def test_an_engine_that_cannot_go_on_says_so_and_tries_no_other_step() -> None:
    engine = BatchInferenceEngine(ContinuousBatchingScheduler(CONFIG), Ended(CONFIG))
    engine.add(request(0))
    with pytest.raises(RankLost, match="rank 1 is gone"):
        engine.step()


class Poisoned(FailingRunner):
    """Reports request 1 as the one at fault for the steps that fail."""

    def run(self, plan: StepPlan) -> list[SliceOutput]:
        try:
            return super().run(plan)
        except RuntimeError as error:
            raise SlicesFailed([1]) from error


@pytest.mark.parametrize("num_forks", [0, 1])
def test_a_request_at_fault_fails_alone_and_the_others_start_over(num_forks: int) -> None:
    scheduler = ContinuousBatchingScheduler(CONFIG)
    runner = Poisoned(CONFIG, lambda plan: any(s.sequence_id == 1 for s in plan.slices))
    engine = BatchInferenceEngine(scheduler, runner, clock=FakeClock())
    requests = [request(0), request(2), request(1), request(3)]
    forks = [requests[2].fork(10 + i) for i in range(num_forks)]
    for r in (*requests, *forks):
        engine.add(r)
    outputs, failures = run(engine)
    assert set(failures) == {1, *(fork.request_id for fork in forks)}
    assert outputs == {i: expected_output([i] * 5, 4) for i in (0, 2, 3)}
    assert not engine.last_step.has_failed
    assert engine.stats().num_free_blocks == CONFIG.num_blocks


def test_a_request_that_ended_in_a_step_that_raised_afterwards_fails() -> None:
    class Raising(AllowedTokens):
        def accept(self, token_id: int) -> None:
            raise RuntimeError("injected")

    _, engine = make_engine(CONFIG)
    done = request(0, max_tokens=1)
    engine.add(done)
    engine.add(make_request(1, [1], max_tokens=3, constraint=Raising([1])))
    outputs, failures = run(engine)
    assert outputs == {}
    assert set(failures) == {0, 1}
    assert engine.last_step.has_failed


def test_a_pool_that_cannot_be_rebuilt_raises() -> None:
    class BrokenRunner(FailingRunner):
        def reset(self) -> None:
            if hasattr(self, "_pool"):
                raise MemoryError
            super().reset()

    scheduler = ContinuousBatchingScheduler(CONFIG)
    runner = BrokenRunner(CONFIG, lambda _: True)
    engine = BatchInferenceEngine(scheduler, runner, clock=FakeClock())
    engine.add(request(0))
    with pytest.raises(MemoryError):
        engine.step()


def test_an_aborted_request_gets_nothing_more() -> None:
    _, engine = make_engine(CONFIG)
    engine.add(request(0, max_tokens=50))
    engine.step()
    engine.abort(0)
    assert not engine.has_work
    engine.abort(0)
    assert engine.stats().num_free_blocks == CONFIG.num_blocks


def test_only_what_is_read_of_prompts_counts_as_prompt_tokens() -> None:
    """A step of 8 tokens has a decode and what it can read of another prompt."""
    _, engine = make_engine(CONFIG)
    engine.add(request(0, max_tokens=4))
    engine.step()
    engine.add(request(1, num_tokens=9, max_tokens=1))
    counts = []
    while engine.has_work:
        engine.step()
        counts.append((engine.last_step.num_tokens, engine.last_step.num_prompt_tokens))
    assert counts == [(8, 7), (3, 2), (1, 0)]


def test_the_stall_of_running_streams_is_bounded_by_time() -> None:
    """They may stall for 200 ms."""
    assert chunks_beside_a_stream(0.2, request(1, num_tokens=200, max_tokens=1)) == [20] * 5


def test_paused_prompts_do_not_lengthen_the_stall_of_running_streams() -> None:
    """Which is as long as a step of decodes, and longer where more prompts wait than streams run."""
    prompts = [make_request(i, [i] * 150, max_tokens=1, is_best_effort=i > 1) for i in range(1, 5)]
    assert chunks_beside_a_stream(10.0, *prompts)[:2] == [32, 32]
    also_live = [make_request(i, [i] * 150, max_tokens=1) for i in range(1, 5)]
    assert chunks_beside_a_stream(10.0, *also_live)[0] > 32


def test_a_prompt_of_best_effort_is_read_in_short_steps_while_others_may_come() -> None:
    """Such a step takes as long as one of decodes: 300 ms, or 30 prompt tokens; later ones take 500 ms."""
    engine, clock, plans = slow_engine(10.0)
    engine.add(request(0, num_tokens=4, max_tokens=3))
    for _ in range(3):
        engine.step()
    engine.add(make_request(1, [1] * 150, max_tokens=1, is_best_effort=True))
    engine.step()
    engine.step()
    clock.now += 5.0
    engine.step()
    assert chunks(plans) == [4, 1, 1, 30, 30, 50]


def test_the_pieces_of_an_image_in_a_step_are_bounded_by_time() -> None:
    """One takes 65 ms: beside streams 3 fit in 250 ms, alone 7 in half a second; at first none is known to fit."""
    engine, clock, plans = slow_engine(0.25)

    def ask(request_id: int, max_tokens: int = 1, *, is_best_effort: bool = False) -> None:
        image = image_of(str(request_id).encode(), 3)
        placed, ids = (PlacedImage(0, image),), image.token_ids
        limits = {"max_tokens": max_tokens, "is_best_effort": is_best_effort}
        engine.add(make_request(request_id, ids, images=placed, **limits))

    def steps(num: int, turn: Turn = ALONE) -> list[str]:
        for _ in range(num):
            engine.step(turn)
        return list(map(str, plans[-num:]))

    ask(0, max_tokens=100)
    assert steps(4) == ["*3[0:1]", "*3[1:8]", "0[0:4] *3[8:12]", "0[4:5]"]
    ask(1)
    steps(9)
    orders = [order for plan in plans[4:] for order in plan.encodes]
    assert [order.stop - order.first for order in orders] == [3] * 4
    engine.abort(0)
    ask(2, is_best_effort=True)
    # Others may come.
    assert steps(1) == ["*3[0:3]"]
    clock.now += 5.0
    assert steps(1, Turn(has_other_streams=True)) == ["*3[3:6]"]
    assert steps(1) == ["2[0:4] *3[6:12]"]


def chunks_beside_a_stream(max_stall: float, *requests: BatchRequest) -> list[int]:
    """Return the longest slices of five steps of a slow engine."""
    engine, _, plans = slow_engine(max_stall)
    engine.add(request(0, num_tokens=4, max_tokens=100))
    engine.step()
    engine.step()
    engine.add(*requests)
    for _ in range(5):
        engine.step()
    assert chunks(plans[:2]) == [4, 1]
    return chunks(plans[2:])


def chunks(plans: Sequence[StepPlan]) -> list[int]:
    """Return the longest slices."""
    return [max(len(s) for s in plan.slices) for plan in plans]


def slow_engine(max_stall: float) -> tuple[BatchInferenceEngine, FakeClock, list[StepPlan]]:
    """Return an engine, its clock, and the plans of its steps.

    A prompt token costs 10 ms, a step of decodes 300, and a piece of an image 65.
    """
    config = SchedulerConfig(
        num_blocks=64, max_num_batched_tokens=256, prefill_chunk=256, num_image_pieces=12
    )
    clock = FakeClock()
    plans: list[StepPlan] = []

    class SlowRunner(TokenRunner):
        def run(self, plan: StepPlan) -> list[SliceOutput]:
            plans.append(plan)
            lengths = [len(s) for s in plan.slices]
            clock.now += 0.3 * (1 in lengths) + 0.01 * sum(n for n in lengths if n > 1)
            clock.now += 0.065 * sum(order.stop - order.first for order in plan.encodes)
            return super().run(plan)

    scheduler = ContinuousBatchingScheduler(config)
    engine = BatchInferenceEngine(scheduler, SlowRunner(config), max_stall=max_stall, clock=clock)
    return engine, clock, plans
