"""Engines with a store: what waits for it, and what goes on meanwhile."""

from collections.abc import Callable, Sequence

import pytest

from batching.batch_inference import BatchInferenceEngine
from batching.block_store.keys import Fetch, Key, Kind
from batching.block_store.statistics import Skip
from batching.config import SchedulerConfig
from batching.request import BatchRequest
from batching.scheduler import ContinuousBatchingScheduler, StoreLimits
from batching.steps.step_plan import SliceOutput, StepPlan
from tests.support.block_stores import FakeStore
from tests.support.fakes import FakeClock, TokenRunner, make_engine, right, small_config
from tests.support.requests import make_request


def traces(
    config: SchedulerConfig, store: FakeStore, requests: Sequence[BatchRequest]
) -> list[str]:
    """Serve requests in a new engine, and return its plans; all that may be stored then is."""
    scheduler, runner = ContinuousBatchingScheduler(config, store), TokenRunner(config, store)
    for each in requests:
        scheduler.add(each)
    lines: list[str] = []
    while scheduler.has_work or scheduler.has_unsaved:
        plan = scheduler.schedule(now=0.0)
        lines.append(str(plan))
        scheduler.update(plan, runner.run(plan))
    assert right(*requests)
    return lines


PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def served(engine: BatchInferenceEngine, *requests: BatchRequest) -> None:
    """Serve requests, and store what is to be."""
    engine.add(*requests)
    while engine.can_step:
        engine.step()


class SlowStore(FakeStore):
    """Has read nothing until it is told that it has."""

    is_slow = True

    def state_of(self, key: Key) -> Fetch:
        return Fetch.READING if self.is_slow else super().state_of(key)


def filled() -> SlowStore:
    store = SlowStore()
    traces(small_config(), store, [make_request(0, PROMPT, max_tokens=3)])
    return store


def test_an_engine_whose_requests_wait_for_the_store_does_not_step() -> None:
    store = filled()
    _, engine = make_engine(small_config(), store=store)
    waiting = make_request(1, PROMPT, max_tokens=3)
    served(engine, waiting)
    assert engine.has_work
    assert not waiting.output_token_ids
    # Another request goes on meanwhile.
    other = make_request(2, [9, 9, 9], max_tokens=3)
    served(engine, other)
    assert right(other)
    store.is_slow = False
    engine.go_on()
    served(engine)
    assert right(waiting)
    assert not engine.has_work


def test_requests_with_the_same_prefix_wait_for_the_one_that_reads_it() -> None:
    store = filled()
    scheduler, engine = make_engine(small_config(), store=store)
    requests = [make_request(i, PROMPT, max_tokens=3) for i in (1, 2)]
    served(engine, *requests)
    assert scheduler.stats().num_running == 1
    store.is_slow = False
    engine.go_on()
    served(engine)
    assert right(*requests)
    assert store.stats.num_read == 2


def test_a_request_that_leaves_while_it_waits_gives_all_back() -> None:
    store = filled()
    scheduler, engine = make_engine(small_config(), store=store)
    served(engine, make_request(1, PROMPT, max_tokens=3))
    engine.abort(1)
    served(engine)
    assert not engine.has_work
    assert scheduler.stats().num_free_blocks == 16


def test_what_is_computed_sooner_than_read_is_not_read() -> None:
    store = filled()
    store.is_slow = False
    store.stats.reading.add(num=1, seconds=60.0)
    scheduler = ContinuousBatchingScheduler(small_config(), store)
    request = make_request(1, PROMPT, max_tokens=3)
    scheduler.add(request)
    plan = scheduler.schedule(store=StoreLimits(seconds_per_token=0.001))
    assert str(plan).startswith("1[0:8]")
    assert store.stats.skipped[Skip.READING_IS_SLOWER] == 1


def test_beside_streams_storing_waits_for_its_share_of_the_time() -> None:
    store, config = FakeStore(), small_config()
    scheduler, runner = ContinuousBatchingScheduler(config, store), TokenRunner(config, store)
    scheduler.add(make_request(0, PROMPT, max_tokens=6))
    lines: list[str] = []
    for now in (0.0, 0.0, 0.0, 0.2, 0.2):
        plan = scheduler.schedule(now=now)
        lines.append(str(plan))
        scheduler.update(plan, runner.run(plan))
    # 2 % of 0.2 s are enough for what is not measured yet.
    assert lines == ["0[0:8]", "0[8:10]", "0[10:11]", "0[11:12] 0>block", "0[12:13]"]


class Stopping(TokenRunner):
    """Has something happen in each step that only stores."""

    def __init__(self, config: SchedulerConfig, store: FakeStore, do: Callable[[], None]) -> None:
        super().__init__(config, store)
        self._do = do

    def run(self, plan: StepPlan) -> list[SliceOutput]:
        if plan.saves and not plan.slices:
            self._do()
        return super().run(plan)


def ended(store: FakeStore | None, clock: FakeClock, do: Callable[[], None]) -> int:
    """End an engine beside whose stream nothing was stored; return how many blocks of four are, within three seconds."""
    config = small_config()

    def wrap(plain: TokenRunner) -> TokenRunner:
        return plain if store is None else Stopping(config, store, do)

    _, engine = make_engine(config, wrap, clock=clock, store=store)
    engine.add(make_request(0, [*range(16)], max_tokens=9))
    for _ in range(4):
        engine.step()
    engine.drain()
    engine.save_rest(3.0)
    return 0 if store is None else len(store.entries)


def test_the_end_stores_what_is_left_as_long_as_it_may() -> None:
    clock = FakeClock()
    assert ended(FakeStore(), clock, lambda: None) == 4
    assert ended(None, clock, lambda: None) == 0

    def pass_a_second() -> None:
        clock.now += 1

    assert ended(FakeStore(), clock, pass_a_second) == 3


@pytest.mark.parametrize("num", [0, 2])
def test_the_end_goes_on_where_storing_fails(num: int) -> None:
    left = [None] * num
    assert ended(FakeStore(), FakeClock(), left.pop) == num


def states(store: FakeStore) -> dict[int, list[int]]:
    """Return the tokens that each stored state follows, by the first one of its prompt's last block."""
    return {
        entry.token_ids[0]: [*entry.contents[0]]
        for key, entry in store.entries.items()
        if key.kind is Kind.STATE
    }


def test_what_is_stored_at_the_end_is_what_belongs_there() -> None:
    """The state of the last request is still to be copied to the slot that had another one's."""
    store = FakeStore()
    config = small_config(max_num_batched_tokens=32, num_blocks=64, num_checkpoints=1)
    _, engine = make_engine(config, store=store)
    served(engine, make_request(0, [*range(1, 10)], max_tokens=1))
    engine.add(make_request(1, [*range(11, 20)], max_tokens=1))
    while engine.has_work:
        engine.step()
    engine.save_rest(9)
    assert states(store) == {5: [*range(1, 9)], 15: [*range(11, 19)]}


def test_what_cannot_be_stored_at_the_end_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    store = FakeStore()
    _, engine = make_engine(small_config(), store=store)
    engine.add(make_request(0, PROMPT, max_tokens=2))
    while engine.has_work:
        engine.step()
    store.entries = None  # type: ignore[assignment]
    engine.save_rest(9)
    assert "not all keys and values are stored" in caplog.text


class FullStore(FakeStore):
    """Takes nothing while it is full."""

    is_busy = True

    @property
    def is_full(self) -> bool:
        return self.is_busy


def test_what_a_full_store_does_not_take_waits() -> None:
    store = FullStore()
    _, engine = make_engine(small_config(), store=store)
    served(engine, make_request(0, PROMPT, max_tokens=2))
    assert not engine.has_work
    assert (len(store.entries), engine.will_step) == (0, True)
    store.is_busy = False
    served(engine)
    assert (len(store.entries), engine.will_step) == (2, False)


def test_a_disk_that_was_slow_once_is_tried_again() -> None:
    store = FakeStore()
    config = small_config()
    traces(config, store, [make_request(0, PROMPT, max_tokens=3)])
    store.stats.reading.add(1, 1.0)
    scheduler, runner = ContinuousBatchingScheduler(config, store), TokenRunner(config, store)
    num_read = []
    for i, now in enumerate((1.0, 59.0, 61.0, 62.0, 122.0)):
        # Others have had the pool.
        scheduler._kv.forget_cached()
        request = make_request(i, PROMPT, max_tokens=1)
        scheduler.add(request)
        while scheduler.has_work:
            plan = scheduler.schedule(store=StoreLimits(seconds_per_token=0.001), now=now)
            scheduler.update(plan, runner.run(plan))
        num_read.append(store.stats.num_read)
    assert num_read == [0, 0, 2, 2, 4]


def test_requests_that_wait_are_looked_after_whatever_others_do() -> None:
    """An engine is asked whether it has work as long as others have some."""
    store, clock = filled(), FakeClock()
    _, engine = make_engine(small_config(), store=store, clock=clock)
    waiting = make_request(1, PROMPT, max_tokens=3)
    served(engine, waiting)
    assert not engine.can_step
    store.is_slow = False
    clock.now += 0.9
    assert (engine.can_step, engine.will_step) == (False, True)
    clock.now += 0.2
    # The MLX thread, which asked `can_step` before, waits with a timeout.
    assert (engine.can_step, engine.will_step) == (True, True)
    served(engine)
    assert right(waiting)


def test_steps_that_only_store_are_none_of_the_models() -> None:
    _, engine = make_engine(small_config(), store=FakeStore())
    engine.add(make_request(0, PROMPT, max_tokens=2))
    are_idle: list[bool] = []
    while engine.can_step:
        engine.step()
        are_idle.append(engine.last_step.is_idle)
    assert are_idle == [False, False, False, True, True]
