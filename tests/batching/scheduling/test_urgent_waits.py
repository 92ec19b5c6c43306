"""Running requests that make way for more urgent ones, and how long each class waits at most."""

from collections.abc import Iterable
from itertools import count
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from batching.admission.urgency import MIN_RUN
from batching.batch_inference import BatchInferenceEngine
from batching.config import SchedulerConfig
from batching.priority_queue import Priority
from batching.request import BatchRequest
from batching.scheduler import ContinuousBatchingScheduler
from batching.scheduling.outputs import RequestOutput
from batching.steps.step_plan import SliceOutput, StepPlan
from tests.support.fakes import FakeClock, TokenRunner, request, right, small_config
from tests.support.pipelined import Pipelined
from tests.support.requests import make_request

# Seconds.
WAIT = 0.5


class Server:
    """A scheduler, and the plans that it makes at given times."""

    def __init__(self, **limits: Any) -> None:
        self.scheduler = ContinuousBatchingScheduler(small_config(**limits))
        self._runner = TokenRunner(self.scheduler.config)
        self._now = 0.0

    def add(self, *requests: BatchRequest) -> None:
        for r in requests:
            self.scheduler.add(r)

    def plans(self, *times: float) -> list[str]:
        lines: list[str] = []
        for self._now in times:
            plan = self.scheduler.schedule(now=self._now)
            lines.append(str(plan))
            self.scheduler.update(plan, self._runner.run(plan))
        return lines

    def finish(self, *requests: BatchRequest) -> None:
        """Serve what there is; all of it is right, and nothing is left."""
        while self.scheduler.has_work:
            self.plans(self._now + 0.1)
        assert right(*requests)
        assert self.scheduler.stats().num_free_blocks == self.scheduler.config.num_blocks


def high(request_id: int, num_tokens: int, max_tokens: int, arrival_time: float) -> BatchRequest:
    return request(
        request_id, num_tokens, max_tokens, arrival_time=arrival_time, priority=Priority.HIGH
    )


def low(
    request_id: int, num_tokens: int, max_tokens: int, arrival_time: float = 0.0
) -> BatchRequest:
    return request(
        request_id, num_tokens, max_tokens, arrival_time=arrival_time, priority=Priority.LOW
    )


def test_after_the_wait_the_one_due_last_makes_way_and_goes_on_behind_its_cached_blocks() -> None:
    server, old, new = Server(max_num_seqs=2), low(0, 2, 9), low(1, 6, 9)
    urgent = high(2, 2, 2, 10.0)
    server.add(old, new)
    assert server.plans(5.0) == ["0[0:2] 1[0:6]"]
    server.add(urgent)
    assert server.plans(10.1, 10.4, 10.5, 10.6, 10.7) == [
        "0[2:3] 1[6:7]",
        "0[3:4] 1[7:8]",
        "0[4:5] 2[0:2] -1",
        "2[2:3] 0[5:6]",
        "0[6:7] 1[8:9]",
    ]
    stats = server.scheduler.stats()
    assert (stats.num_preemptions, stats.num_urgent_preemptions) == (1, 1)
    server.finish(old, new, urgent)


def test_the_lowest_class_makes_way_first() -> None:
    server = Server(max_num_seqs=2)
    normal, lowest, urgent = request(0, 2, 9, arrival_time=4.0), low(1, 2, 9), high(2, 2, 1, 9.0)
    server.add(normal, lowest)
    server.plans(5.0)
    server.add(urgent)
    assert server.plans(9.5) == ["0[2:3] 2[0:2] -1"]
    server.finish(normal, lowest, urgent)


@pytest.mark.parametrize("priority", [Priority.HIGH, Priority.NORMAL])
def test_the_same_or_a_higher_class_never_makes_way(priority: Priority) -> None:
    server, runs = Server(max_num_seqs=1), request(0, 2, 3, priority=priority)
    server.add(runs, request(1, 2, 1))
    assert server.plans(90.0, 98.0, 99.0, 99.1) == ["0[0:2]", "0[2:3]", "0[3:4]", "1[0:2]"]


def test_without_a_wait_none_makes_way() -> None:
    server = Server(max_num_seqs=1, max_urgent_wait_ms=None)
    server.add(low(0, 2, 3))
    server.plans(40.0)
    server.add(high(1, 2, 1, 50.0))
    assert server.plans(99.0, 99.1, 99.2) == ["0[2:3]", "0[3:4]", "1[0:2]"]


def test_as_many_make_way_as_the_blocks_take() -> None:
    server = Server(num_blocks=8)
    running = [low(i, 3, 5) for i in range(4)]
    server.add(*running)
    server.plans(1.0, 1.1)
    urgent = high(4, 13, 2, 5.0)
    server.add(urgent)
    assert server.plans(6.0) == ["0[4:5] 1[4:5] 4[0:6] -3 -2"]
    server.finish(*running, urgent)


def test_none_makes_way_in_vain() -> None:
    """The blocks of a low one would not suffice."""
    server = Server(num_blocks=4, max_num_seqs=3)
    running = [request(0, 8, 4, priority=Priority.HIGH), low(1, 2, 2)]
    server.add(*running)
    assert server.plans(1.0) == ["0[0:6] 1[0:2]"]
    urgent = high(2, 9, 2, 2.0)
    server.add(urgent)
    assert server.plans(9.0) == ["1[2:3] 0[6:8]"]
    assert server.scheduler.stats().num_preemptions == 0
    server.finish(*running, urgent)


def test_one_that_was_admitted_runs_for_a_while() -> None:
    server, runs = Server(max_num_seqs=1, num_blocks=32), low(0, 2, 90)
    server.add(runs)
    server.plans(9.0)
    server.add(high(1, 2, 1, 10.0))
    assert server.plans(9.0 + MIN_RUN - 0.01, 9.0 + MIN_RUN) == ["0[2:3]", "1[0:2] -0"]
    server.add(high(2, 2, 1, 30.0))
    begin = 30.1
    assert server.plans(begin, begin + MIN_RUN - 0.01, begin + MIN_RUN) == [
        "0[0:4]",
        "0[4:5]",
        "2[0:2] -0",
    ]


def test_one_that_has_waited_for_less_comes_before_an_urgent_one_behind_it() -> None:
    server = Server(max_num_seqs=1)
    server.add(low(0, 2, 9))
    server.plans(1.0)
    server.add(request(1, 2, 1, arrival_time=9.0), high(2, 2, 1, 9.4))
    assert server.plans(9.49, 9.5, 9.6) == ["0[2:3]", "2[0:2] -0", "1[0:2]"]


def test_an_urgent_one_does_not_wait_for_room_behind_lower_ones_that_have_aged() -> None:
    server = Server(max_num_seqs=1)
    runs, *waiting = (low(i, 2, 9) for i in range(3))
    server.add(runs)
    server.plans(1.0)
    urgent = high(3, 2, 1, 90.0)
    server.add(*waiting, urgent)
    assert server.plans(90.4, 90.5, 90.6) == ["0[2:3]", "3[0:2] -0", "0[0:4]"]
    server.finish(runs, *waiting, urgent)


def test_the_room_that_a_lower_class_leaves_is_the_urgent_ones() -> None:
    """Though none makes way, since each runs for less than the time that it may run."""
    server = Server(max_num_seqs=1)
    server.add(*(low(i, 2, 2) for i in range(6)), high(7, 2, 2, 90.0))
    assert server.plans(90.0, 90.1, 90.2, 90.3, 90.7, 90.8, 90.9) == [
        "0[0:2]",
        "0[2:3]",
        "1[0:2]",
        "1[2:3]",
        "7[0:2]",
        "7[2:3]",
        "2[0:2]",
    ]


def test_the_room_that_a_higher_class_leaves_is_that_of_the_one_due_first() -> None:
    """However many higher ones wait."""
    server = Server(max_num_seqs=1)
    server.add(*(high(i, 2, 1, 90.0) for i in range(9)), *(low(10 + i, 2, 1) for i in range(3)))
    assert server.plans(91.0, 91.1, 91.2, 91.3, 91.4, 91.5) == [
        "0[0:2]",
        "10[0:2]",
        "1[0:2]",
        "11[0:2]",
        "2[0:2]",
        "12[0:2]",
    ]


def test_a_turn_that_nobody_needs_is_none_later() -> None:
    server = Server(max_num_seqs=2)
    server.add(high(0, 2, 1, 0.0), high(1, 2, 1, 0.0), low(2, 2, 2))
    assert server.plans(1.0, 1.1) == ["0[0:2] 1[0:2]", "2[0:2]"]
    server.add(low(3, 2, 2), low(4, 2, 1), high(5, 2, 1, 90.0), high(6, 2, 1, 90.0))
    assert server.plans(90.5, 90.6) == ["5[0:2] 6[0:2] -2", "2[0:3] 3[0:2]"]


def test_the_prompt_of_the_highest_class_is_read_first_and_the_one_due_first_advances() -> None:
    server = Server(num_blocks=64)
    first, second = low(0, 40, 1), low(1, 20, 1)
    urgent = high(2, 30, 1, 90.0)
    server.add(first, second, urgent)
    assert server.plans(91.0) == ["2[0:4] 0[0:2] 1[0:2]"]
    server.finish(first, second, urgent)


def test_when_blocks_run_out_a_lower_class_gives_its_own() -> None:
    server = Server(num_blocks=4)
    old, urgent = low(0, 7, 6), high(1, 5, 6, 90.0)
    server.add(old, urgent)
    server.finish(old, urgent)
    assert (old.num_preemptions, urgent.num_preemptions) == (1, 0)
    assert server.scheduler.stats().num_urgent_preemptions == 0


def test_a_fork_has_run_since_its_prompt_was_admitted() -> None:
    server, forked = Server(max_num_seqs=2), low(0, 2, 40)
    fork = forked.fork(1)
    server.add(forked)
    server.plans(9.0)
    server.add(high(2, 2, 1, 9.0))
    assert server.plans(9.9, 9.0 + MIN_RUN) == ["0[2:3] 1[2:3] 0>8", "0[3:4] 2[0:2] -1"]
    server.finish(forked, fork)


def test_blocks_that_others_share_are_no_room() -> None:
    """A low one gives its own block only."""
    server = Server(num_blocks=5, max_num_seqs=3)
    runs = make_request(0, range(8), max_tokens=4, priority=Priority.HIGH)
    shares = make_request(1, [*range(8), 9], max_tokens=3, priority=Priority.LOW)
    server.add(runs)
    server.plans(1.0)
    server.add(shares)
    assert server.plans(1.1) == ["0[8:9] 1[8:9]"]
    urgent = high(2, 9, 1, 2.0)
    server.add(urgent)
    assert server.plans(9.0) == ["0[9:10] 1[9:10]"]
    server.finish(runs, shares, urgent)


def test_blocks_that_it_shares_with_what_makes_way_are_no_room() -> None:
    server = Server(num_blocks=4, max_num_seqs=3)
    runs = make_request(0, range(8), max_tokens=4, priority=Priority.LOW)
    server.add(runs)
    server.plans(1.0, 1.1)
    other = request(1, 2, 4, priority=Priority.HIGH)
    server.add(other)
    assert server.plans(1.2) == ["0[9:10] 1[0:2]"]
    # It shares two blocks, and needs two; there is none, and the low one has one more.
    urgent = make_request(
        2, [*range(8), *range(7)], max_tokens=1, priority=Priority.HIGH, arrival_time=2.0
    )
    server.add(urgent)
    assert server.plans(9.0) == ["1[2:3] 0[10:11]"]
    assert runs.num_preemptions == 0
    server.finish(runs, other, urgent)


@pytest.mark.parametrize("wait", [500.0, None])
def test_what_may_have_to_make_way_is_read_before_the_next_plan(wait: float | None) -> None:
    server = Server(max_num_seqs=1, max_urgent_wait_ms=wait)
    server.add(request(0, 2, 9))
    plan = server.scheduler.schedule()
    server.add(low(1, 2, 1), request(2, 2, 1))
    assert server.scheduler.can_expect(plan, lambda _: True)
    server.add(high(3, 2, 1, 0.0))
    assert server.scheduler.can_expect(plan, lambda _: True) is (wait is None)


def step_time(num_tokens: int) -> float:
    """The seconds that a step takes."""
    return 0.02 + 0.003 * num_tokens


class TimedRunner(TokenRunner):
    """Lets the time of its steps pass."""

    def __init__(self, config: SchedulerConfig, clock: FakeClock) -> None:
        super().__init__(config)
        self._clock = clock

    def run(self, plan: StepPlan) -> list[SliceOutput]:
        self._clock.now += step_time(plan.num_tokens)
        return super().run(plan)


class Life:
    """A request on the clock of its engine."""

    def __init__(self, request: BatchRequest) -> None:
        self.request = request
        self.arrived = request.arrival_time
        self.first_token = self.ended = inf

    @property
    def admitted(self) -> float:
        assert self.request.scheduled_time is not None
        return self.request.scheduled_time

    def rivals(self, lives: Iterable["Life"], until: float) -> list["Life"]:
        """Return the requests of its class and higher that are there from its arrival on, itself included."""
        return [
            other
            for other in lives
            if other.request.rank <= self.request.rank
            and other.arrived <= until
            and other.ended >= self.arrived
        ]


class Timeline:
    """An engine whose steps take a known time, and the lives of its requests."""

    def __init__(self, config: SchedulerConfig, *, is_pipelined: bool = False) -> None:
        self.clock = FakeClock()
        self.lives: dict[int, Life] = {}
        runner = TimedRunner(config, self.clock)
        pipeline = Pipelined(runner) if is_pipelined else None
        self.engine = BatchInferenceEngine(
            ContinuousBatchingScheduler(config), runner, clock=self.clock, pipeline=pipeline
        )

    def add(self, request: BatchRequest) -> None:
        self.lives[request.request_id] = Life(request)
        self.engine.add(request)

    def step(self) -> None:
        for item in self.engine.step():
            assert isinstance(item, RequestOutput)
            life = self.lives[item.request_id]
            life.first_token = min(life.first_token, self.clock.now)
            if item.output.finish_reason is not None:
                life.ended = self.clock.now

    def serve(self, requests: Iterable[BatchRequest]) -> list[Life]:
        """Serve each request from its arrival on, to their ends."""
        arriving = sorted(requests, key=lambda r: r.arrival_time)
        while arriving or self.engine.has_work:
            if not self.engine.has_work:
                self.clock.now = max(self.clock.now, arriving[0].arrival_time)
            while arriving and arriving[0].arrival_time <= self.clock.now:
                self.add(arriving.pop(0))
            self.step()
        assert right(*(life.request for life in self.lives.values()))
        return list(self.lives.values())


@pytest.mark.parametrize(("wait", "longest"), [(300.0, 0.32), (None, step_time(200))])
def test_what_arrives_in_a_step_without_streams_does_not_wait_longer_for_its_end(
    wait: float | None, longest: float
) -> None:
    """As soon as the engine knows how long a prompt takes."""
    config = SchedulerConfig(
        max_num_batched_tokens=200, prefill_chunk=200, max_urgent_wait_ms=wait, block_size=4
    )
    timeline, durations = Timeline(config), []
    timeline.add(make_request(0, [i % 64 for i in range(1000)], max_tokens=1))
    while timeline.engine.has_work:
        timeline.step()
        durations.append(timeline.engine.last_step.duration)
    assert durations[0] == pytest.approx(step_time(200))
    assert max(durations[1:]) == pytest.approx(longest, rel=0.05)


@st.composite
def loads(draw: st.DrawFn) -> tuple[SchedulerConfig, list[BatchRequest]]:
    """Few slots, blocks enough, and more requests of the lower classes than of the higher."""
    num_slots = draw(st.sampled_from([1, 1, 2, 3]))
    config = SchedulerConfig(
        num_blocks=512,
        block_size=4,
        max_num_seqs=num_slots,
        max_num_batched_tokens=num_slots + draw(st.integers(1, 10)),
        prefill_chunk=draw(st.integers(4, 16)),
        max_urgent_wait_ms=draw(st.sampled_from([1.0, 1.0, 300.0])),
        aging_rate=draw(st.sampled_from([5.0, 5.0, 0.1])),
    )
    requests, longest = [], draw(st.sampled_from([40, 40, 200]))
    for i in range(draw(st.integers(10, 30))):
        is_low = draw(st.integers(0, 9)) > 0
        requests.append(
            request(
                i,
                draw(st.integers(1, 60 if is_low else 9)),
                draw(st.integers(1, longest if is_low else 3)),
                arrival_time=draw(st.integers(0, 10 if is_low else 400)) / 100,
                priority=Priority.LOW
                if is_low
                else draw(st.sampled_from([Priority.HIGH, Priority.NORMAL])),
                is_best_effort=draw(st.integers(0, 9)) == 9,
            )
        )
    return config, requests


@settings(max_examples=40, deadline=None)
@given(loads(), st.booleans())
def test_no_class_waits_for_longer_than_its_bound(
    load: tuple[SchedulerConfig, list[BatchRequest]], is_pipelined: bool
) -> None:
    """With asynchronous scheduling a step more, since one is planned already."""
    config, requests = load
    lives = Timeline(config, is_pipelined=is_pipelined).serve(requests)
    step = step_time(config.max_num_batched_tokens)
    bound = config.max_urgent_wait + MIN_RUN + (2 + is_pipelined) * step
    share = min(
        config.prefill_chunk, (config.max_num_batched_tokens - config.max_num_seqs + 1) // 2
    )
    for life in lives:
        rivals = life.rivals(lives, life.admitted)
        if life.request.rank == Priority.LOW or len(rivals) > config.max_num_seqs:
            continue
        assert life.admitted - life.arrived <= bound
        if life.request.rank == Priority.HIGH:
            prompts = [r.request.num_prompt_tokens for r in life.rivals(lives, life.first_token)]
            num_steps = 1 + sum(-(-num_tokens // share) for num_tokens in prompts)
            assert life.first_token - life.admitted <= num_steps * step


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.lists(st.integers(1, 120), min_size=1, max_size=4), st.booleans())
def test_lower_classes_advance_though_higher_ones_always_wait(
    num_slots: int, lengths: list[int], is_pipelined: bool
) -> None:
    config = SchedulerConfig(
        num_blocks=256,
        block_size=4,
        max_num_seqs=num_slots,
        max_num_batched_tokens=16,
        aging_rate=1.0,
        max_urgent_wait_ms=1.0,
    )
    timeline = Timeline(config, is_pipelined=is_pipelined)
    lowest = [low(i, length, length) for i, length in enumerate(lengths)]
    for r in lowest:
        timeline.add(r)
    numbers = count(len(lowest))
    step, num_steps = step_time(config.max_num_batched_tokens), sum(1 + 2 * n for n in lengths)
    # Each runs for its own steps, and before each of its turns a request of 9 tokens does.
    num_turns = sum(1 + 2 * n * step / MIN_RUN for n in lengths)
    limit = 2 / config.aging_rate + num_steps * step + num_turns * 8 * step
    while not all(r.has_ended for r in lowest):
        while timeline.engine.stats().num_waiting < num_slots + len(lowest):
            number = next(numbers)
            prompt = [100 + number % 100, 1, 2]
            timeline.add(
                make_request(
                    number,
                    prompt,
                    max_tokens=6,
                    arrival_time=timeline.clock.now,
                    priority=Priority.HIGH,
                )
            )
        timeline.step()
        assert timeline.clock.now < limit


def test_an_engine_asks_for_a_turn_for_a_request_that_others_make_way_for() -> None:
    """As long as none can, only what decodes asks for one."""
    server = Server(max_num_seqs=1)
    low = request(0, 2, 9, priority=Priority.LOW)
    server.add(low)
    server.plans(0.0, 0.1)
    server.add(high(1, 3, 1, 0.2))
    demands = [server.scheduler.demand(now) for now in (0.3 + WAIT, MIN_RUN + 0.1)]
    assert [(d.num_streams, d.rank, d.num_pending) for d in demands] == [(1, inf, inf), (1, 0, 3)]
    server.finish(low)


def test_a_request_that_finds_room_asks_for_a_turn_at_once() -> None:
    server = Server(max_num_seqs=2)
    assert not server.scheduler.demand(0.0).is_interactive
    server.add(request(0, 4, 1))
    demand = server.scheduler.demand(0.0)
    assert (demand.num_streams, demand.num_pending) == (0, 4)
    assert not demand.has_best_effort
