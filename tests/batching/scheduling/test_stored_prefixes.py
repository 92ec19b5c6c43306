"""Prefixes that are in the store: read instead of computed, whatever the model keeps of them."""

from collections.abc import Sequence
from math import inf
from typing import Any, Final

import pytest

from batching.batch_inference import BatchInferenceEngine
from batching.block_store.keys import Key, Kind
from batching.block_store.statistics import Skip
from batching.config import SchedulerConfig
from batching.kv_cache import restored_prefixes, saved_blocks
from batching.kv_cache.window_blocks import WindowBlocks
from batching.request import BatchRequest
from batching.scheduler import UNLIMITED, ContinuousBatchingScheduler, StoreLimits
from tests.support.block_stores import FakeStore
from tests.support.fakes import TokenRunner, right, small_config
from tests.support.requests import make_request

PROMPT: Final = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
# 5 blocks, of which a hit may have all.
LONG: Final = [*range(1, 22)]


class Life:
    """An engine, from its start on, with a store that outlives it."""

    def __init__(self, store: FakeStore, **changes: Any) -> None:
        self.config: SchedulerConfig = small_config(
            **{"max_num_batched_tokens": 32, "num_blocks": 64} | changes
        )
        self.scheduler = ContinuousBatchingScheduler(self.config, store)
        self.runner = TokenRunner(self.config, store)

    def step(self, limits: StoreLimits = UNLIMITED) -> str:
        plan = self.scheduler.schedule(None, inf, limits, now=0.0)
        self.scheduler.update(plan, self.runner.run(plan))
        return str(plan)

    def serve(self, *requests: BatchRequest, limits: StoreLimits = UNLIMITED) -> list[str]:
        """Serve requests, and return the plans; all that may be stored then is."""
        for each in requests:
            self.scheduler.add(each)
        lines: list[str] = []
        while self.scheduler.has_work or self.scheduler.has_unsaved:
            lines.append(self.step(limits))
            assert len(lines) < 500
        assert right(*requests)
        return lines


def asked(request_id: int, prompt: Sequence[int] = LONG, max_tokens: int = 2) -> BatchRequest:
    return make_request(request_id, prompt, max_tokens=max_tokens)


def stored(**changes: Any) -> FakeStore:
    """Return a store with what a request leaves there."""
    store = FakeStore()
    Life(store, **changes).serve(asked(0))
    return store


def keys(store: FakeStore, kind: Kind = Kind.BLOCK) -> list[Key]:
    return [key for key in store.entries if key.kind is kind]


def num_hit(store: FakeStore, **changes: Any) -> int:
    """Serve the prompt in another life; return how many of its tokens were read."""
    request = asked(1)
    Life(store, **changes).serve(request)
    return request.num_cached_tokens


def test_a_prefix_is_read_in_the_next_life() -> None:
    store = FakeStore()
    first = Life(store, num_blocks=16, max_num_batched_tokens=16)
    assert first.serve(asked(0, PROMPT, 3)) == [
        "0[0:10]",
        "0[10:11]",
        "0[11:12]",
        "0>block",
        "1>block",
        "2>block",
    ]
    again = asked(1, PROMPT, 3)
    # How long a block takes is not known before the first.
    second = Life(store, num_blocks=16, max_num_batched_tokens=16)
    assert second.serve(again) == [
        "block>0",
        "1[8:10] block>1",
        "1[10:11]",
        "1[11:12]",
    ]
    assert again.num_cached_tokens == 8


WINDOWS: Final[dict[str, Any]] = {"window": 8, "num_window_blocks": 34}
STATES: Final[dict[str, Any]] = {"num_checkpoints": 8}


@pytest.mark.parametrize("changes", [{}, WINDOWS, STATES, WINDOWS | STATES])
def test_a_hit_is_the_whole_prefix_if_all_of_it_is_there(changes: dict[str, Any]) -> None:
    assert num_hit(stored(**changes), **changes) == 20


@pytest.mark.parametrize(("index", "hit"), [(0, 0), (2, 8), (4, 16)])
def test_a_hit_ends_where_a_block_is_missing(index: int, hit: int) -> None:
    store = stored()
    del store.entries[keys(store)[index]]
    assert num_hit(store) == hit


@pytest.mark.parametrize(("index", "hit"), [(0, 20), (2, 20), (3, 12), (4, 16)])
def test_a_hit_ends_where_its_window_is_there(index: int, hit: int) -> None:
    """One sees two blocks before its own."""
    store = stored(**WINDOWS)
    del store.entries[keys(store, Kind.WINDOW)[index]]
    assert num_hit(store, **WINDOWS) == hit


def test_a_hit_ends_where_a_state_was_kept() -> None:
    store = stored(**STATES)
    for key in keys(store, Kind.STATE):
        del store.entries[key]
    assert num_hit(store, **STATES) == 0


class Losing(FakeStore):
    """A store that loses entries when they are read."""

    def __init__(self, store: FakeStore, *lost: Key) -> None:
        super().__init__()
        self.entries = store.entries
        self.lost = lost

    def fetch(self, keys: Sequence[Key]) -> None:
        super().fetch(keys)
        for key in self.lost:
            self.entries.pop(key, None)


@pytest.mark.parametrize(
    ("kind", "index", "hit"),
    [
        (Kind.BLOCK, 0, 0),
        (Kind.BLOCK, 3, 12),
        (Kind.BLOCK, 4, 16),
    ],
)
def test_what_is_lost_is_computed_from_there(kind: Kind, index: int, hit: int) -> None:
    store = stored()
    assert num_hit(Losing(store, keys(store, kind)[index])) == hit
    assert num_hit(store) == 20


@pytest.mark.parametrize("kind", [Kind.BLOCK, Kind.WINDOW, Kind.STATE])
def test_a_prefix_whose_end_is_lost_is_computed(kind: Kind) -> None:
    changes = WINDOWS | STATES
    store = stored(**changes)
    losing = Losing(store, keys(store, kind)[-1 if kind is Kind.STATE else 4])
    assert num_hit(losing, **changes) == 0
    assert num_hit(store, **changes) == 20


def test_a_prefix_without_room_for_its_window_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    store = stored(**WINDOWS)
    monkeypatch.setattr(WindowBlocks, "restart", lambda *_: None)
    assert num_hit(store, **WINDOWS) == 0


def test_what_is_slower_to_read_is_computed() -> None:
    store, request = stored(), asked(1)
    store.stats.reading.add(1, 10.0)
    slow = StoreLimits(seconds_per_token=1.0)
    Life(store).serve(request, limits=slow)
    assert request.num_cached_tokens == 0
    assert store.stats.skipped == {Skip.READING_IS_SLOWER: 1}
    # A block of 4 tokens has 4 bytes here.
    slower, request = StoreLimits(seconds_per_token=10.1), asked(1)
    Life(store).serve(request, limits=slower)
    assert request.num_cached_tokens == 20


def test_streams_wait_for_a_block_or_for_what_fits_in_their_time() -> None:
    store = stored()
    store.stats.restoring.add(1, 0.25)
    (size,) = {store.size_of(key) for key in keys(store)}
    # Of two blocks, and a little.
    limits = StoreLimits(max_restore_seconds=size * 0.25 * 2.1)
    plans = Life(store).serve(asked(1), limits=limits)
    assert plans[0] == "block>0 block>1"
    request, other = asked(1), asked(2, [*LONG[:8], *range(50, 60)])
    tight = StoreLimits(max_restore_seconds=size * 0.25 / 2)
    lines = Life(store).serve(request, other, limits=tight)
    assert max(line.count("block>") for line in lines) == 1
    assert (request.num_cached_tokens, other.num_cached_tokens) == (20, 8)


def test_blocks_are_read_ahead_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restored_prefixes, "_READ_AHEAD", 1)
    most = 0

    class Watched(FakeStore):
        def fetch(self, keys: Sequence[Key]) -> None:
            nonlocal most
            super().fetch(keys)
            most = max(most, len(self._asked))

    watched = Watched()
    watched.entries = stored().entries
    assert num_hit(watched) == 20
    assert most == 2


def test_a_request_that_leaves_forgets_what_it_asked_for() -> None:
    store = FakeStore(lambda most: 0 if most == 15 else 1)
    store.entries = stored().entries
    life, request = Life(store), asked(1)
    life.scheduler.add(request)
    assert life.step() == ""
    assert len(store._asked) == 5
    life.scheduler.abort(request)
    assert store._asked == {}
    assert not life.scheduler.has_work


def test_what_waits_too_long_to_be_stored_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_blocks, "_MAX_WAITING", 3)
    store = stored()
    assert len(keys(store)) == 3
    assert store.stats.skipped == {Skip.EVICTED: 2}


def test_storing_has_a_share_of_the_time_beside_other_work() -> None:
    store = FakeStore()
    life = Life(store)
    store.stats.saving.add(1, 0.001)
    life.scheduler.add(asked(0, LONG, max_tokens=99))
    nums: list[int] = []
    for now in (0, 0.01, 0.09, 0.11, 0.12, 0.31, 60, 120):
        plan = life.scheduler.schedule(now=now)
        nums.append(len(plan.saves))
        life.scheduler.update(plan, life.runner.run(plan))
    # A fiftieth, from two milliseconds on, of which each takes one; 20 of them at most.
    assert nums == [0, 0, 0, 2, 0, 4, 0, 0]
    assert store.stats.num_written == 6


def test_what_is_evicted_before_it_is_stored_is_skipped() -> None:
    store = FakeStore()
    life = Life(store, num_blocks=7)
    life.serve(asked(0), asked(1, [*range(30, 50)]), asked(2, [*range(60, 80)]))
    assert store.stats.skipped[Skip.EVICTED] > 0
    assert 0 < len(store.entries) < 15


def test_prompts_are_stored_first() -> None:
    store = FakeStore()
    Life(store).serve(asked(0, PROMPT, max_tokens=11), asked(1, [*range(30, 50)]))
    prompts = [*store.entries][:7]
    tokens = [tuple(store.entries[key].token_ids) for key in prompts]
    assert all(set(each) <= {*PROMPT} | {*range(30, 50)} for each in tokens)
    assert len(store.entries) > 7


def test_an_output_that_becomes_a_prompt_is_stored_once() -> None:
    store, first = FakeStore(), asked(0, PROMPT, max_tokens=11)
    life = Life(store)
    life.scheduler.add(first)
    while life.scheduler.has_work:
        life.step(StoreLimits(may_save=False))
    use = life.scheduler.stats().store
    assert use is not None
    life.serve(asked(1, [*PROMPT, *first.output_token_ids[:7], 5]))
    assert store.stats.num_written == len(store.entries) == use.num_unsaved


def test_a_step_that_fails_forgets_what_was_to_be_stored() -> None:
    store, request = stored(), asked(1)
    life = Life(store)

    class Flaky:
        """It fails once."""

        run: Any = staticmethod(lambda _: 1 / 0)

        def reset(self) -> None:
            life.runner.reset()
            self.run = life.runner.run

    engine = BatchInferenceEngine(life.scheduler, Flaky())
    engine.add(request)
    engine.step()
    assert engine.last_step.has_failed
    assert store._claimed == {}
    assert not life.scheduler.has_unsaved
    while engine.has_work:
        engine.step()
    assert right(request)
    assert not store._claimed
    assert not store._asked


def test_without_a_prefix_cache_nothing_is_stored() -> None:
    store = stored(enable_prefix_cache=False)
    assert store.entries == {}


def test_what_the_pool_has_and_the_store_lacks_is_stored_with_the_next_hit() -> None:
    """Without its first block a prefix could never be read again."""
    store = FakeStore()
    life = Life(store)
    life.serve(asked(0))
    before = {*keys(store)}
    del store.entries[keys(store)[0]]
    life.serve(asked(1))
    assert {*keys(store)} == before
    assert num_hit(store) == 20
