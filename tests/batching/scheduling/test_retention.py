"""Sessions: what requests ask to be retained is found when others have had the pool, and not for ever."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any, Final

import pytest

from batching import NOT_RETAINED, NOT_STORED, RetainedPrefix, Retention
from batching.block_manager import BlockHash
from batching.kv_cache.retained_blocks import Group, RetainedBlocks
from batching.request import BatchRequest
from batching.scheduler import UNLIMITED, ContinuousBatchingScheduler
from tests.support.block_stores import FakeStore
from tests.support.fakes import TokenRunner, right, small_config
from tests.support.requests import make_request

# 5 blocks, of which a hit may have all.
LONG: Final = [*range(1, 22)]
SESSION: Final = Retention("session", (RetainedPrefix(None, 300),))
WINDOWS: Final[dict[str, Any]] = {"window": 8, "num_window_blocks": 34}
STATES: Final[dict[str, Any]] = {"num_checkpoints": 4}
BOTH: Final = WINDOWS | {"num_checkpoints": 8}


def of_group(group: str) -> Retention:
    return SESSION._replace(group=group)


class Pool:
    """A small pool, with a clock."""

    def __init__(self, store: FakeStore | None = None, **changes: Any) -> None:
        config = small_config(**{"max_num_batched_tokens": 32, "num_blocks": 24} | changes)
        self.scheduler = ContinuousBatchingScheduler(config, store)
        self.runner = TokenRunner(config, store)
        self.now = 0.0
        self._num_served = 0

    def serve(
        self, prompt: Sequence[int], retention: Retention = NOT_RETAINED, max_tokens: int = 2
    ) -> int:
        """Serve a request; return how many of its tokens were cached."""
        spec = make_request(0, prompt, max_tokens=max_tokens).spec
        request = BatchRequest(self._num_served, replace(spec, retention=retention), seed=0)
        self._num_served += 1
        self.scheduler.add(request)
        while self.scheduler.has_work or self.scheduler.has_unsaved:
            plan = self.scheduler.schedule(None, inf, UNLIMITED, now=self.now)
            self.scheduler.update(plan, self.runner.run(plan))
        assert right(request)
        return request.num_cached_tokens

    def flood(self, num: int = 8) -> None:
        """Serve others, which need all of the pool."""
        for _ in range(num):
            self.serve([200 + self._num_served % 50, *LONG[1:]])

    @property
    def num_retained(self) -> int:
        return self.scheduler.stats().num_retained_blocks

    @property
    def num_retained_beside(self) -> tuple[int, int]:
        """Return how many states are retained, and how many blocks of sliding-window layers."""
        kv = self.scheduler._kv
        assert kv.states is not None
        assert kv.windows is not None
        blocks = kv.windows.block_manager.blocks
        return len(kv.states.checkpoints._retained), sum(b.is_retained for b in blocks)


@pytest.mark.parametrize("changes", [{}, WINDOWS, STATES, WINDOWS | STATES])
def test_a_session_is_found_after_a_flood(changes: dict[str, Any]) -> None:
    for retention, found in ((NOT_RETAINED, 0), (SESSION, 20)):
        pool = Pool(**changes)
        assert pool.serve(LONG, retention) == 0
        pool.flood()
        assert pool.serve(LONG) == found


def test_the_output_of_a_session_is_a_part_of_it() -> None:
    pool = Pool()
    prompt = LONG[:19]
    request = make_request(99, prompt, max_tokens=6)
    request = BatchRequest(99, replace(request.spec, retention=SESSION), seed=0)
    pool.scheduler.add(request)
    while pool.scheduler.has_work:
        plan = pool.scheduler.schedule(None, inf, UNLIMITED, now=0.0)
        pool.scheduler.update(plan, pool.runner.run(plan))
    pool.flood()
    assert pool.serve([*request.token_ids, 7, 8]) == 24


@pytest.mark.parametrize("changes", [WINDOWS, {"num_checkpoints": 8}, BOTH])
def test_the_next_turn_may_leave_out_the_output(changes: dict[str, Any]) -> None:
    """As chat templates do with what was only thought."""
    pool = Pool(**changes)
    pool.serve(LONG, SESSION, max_tokens=6)
    pool.flood(20)
    assert pool.serve(LONG) == 20


def test_its_time_begins_with_its_last_use() -> None:
    pool = Pool()
    pool.serve(LONG, SESSION)
    pool.now = 299
    pool.serve(LONG, SESSION)
    pool.now = 598
    pool.flood()
    assert pool.serve(LONG) == 20
    pool.now = 600
    pool.flood()
    assert pool.num_retained == 0
    assert pool.serve(LONG) == 0


def test_each_prefix_has_its_own_time() -> None:
    """Two blocks for an hour, two more for five minutes, and the rest as any other."""
    prefixes = (RetainedPrefix(8, 3600), RetainedPrefix(17, 300))
    pool = Pool()
    pool.serve(LONG, Retention("", prefixes))
    pool.flood()
    assert pool.num_retained == 4
    assert pool.serve(LONG) == 16
    pool.now = 301
    pool.flood()
    assert pool.num_retained == 2
    assert pool.serve(LONG) == 8


def test_a_shorter_time_ends_no_longer_one() -> None:
    pool = Pool()
    pool.serve(LONG, Retention("a", (RetainedPrefix(None, 3600),)))
    pool.serve(LONG, Retention("a", (RetainedPrefix(None, 300),)))
    pool.now = 301
    pool.flood()
    assert pool.serve(LONG) == 20


@pytest.mark.parametrize("changes", [{}, WINDOWS])
def test_a_session_has_so_many_blocks_at_most_and_keeps_its_beginning(
    changes: dict[str, Any],
) -> None:
    """Of 24 blocks 12 can be retained, and 6 by one."""
    pool = Pool(**changes)
    prompt = [*range(1, 38)]
    pool.serve(prompt, SESSION)
    assert pool.num_retained == 6
    pool.flood(20)
    assert pool.serve(prompt) == 24


def test_the_session_that_was_used_least_recently_gives_way() -> None:
    pool = Pool()
    prompts = [[100 + i, *LONG[1:]] for i in range(3)]
    for i, prompt in enumerate(prompts):
        pool.serve(prompt, of_group(str(i)))
    assert pool.num_retained == 12
    pool.flood()
    # Of the first one, two blocks are left.
    assert [pool.serve(prompt) for prompt in prompts] == [8, 20, 20]


def test_sessions_of_one_client_take_nothing_from_the_share_of_another() -> None:
    pool = Pool()
    pool.serve(LONG, SESSION._replace(client="one"))
    for i in range(4):
        pool.serve([100 + i, *LONG[1:]], of_group(str(i))._replace(client="two"))
    pool.flood()
    assert pool.num_retained == 12
    assert pool.serve(LONG) == 20


def test_of_states_and_windows_those_at_the_end_of_a_prefix_are_retained() -> None:
    pool = Pool(num_blocks=100, **BOTH)
    prompt = [*range(1, 42)]
    pool.serve(prompt, Retention("a", (RetainedPrefix(41, 300),)))
    # Other blocks in windows are still there, but no request will begin behind them.
    assert pool.num_retained_beside == (1, 2)
    # It ends before the first state.
    pool.serve([7, *prompt[1:]], Retention("b", (RetainedPrefix(20, 300),)))
    assert pool.num_retained == 15
    assert pool.num_retained_beside == (1, 2)


def test_half_of_the_states_and_windows_is_left_to_others() -> None:
    """Many short sessions have few blocks of the main pool."""
    pool = Pool(num_blocks=200, **BOTH)
    for i in range(20):
        pool.serve([100 + i, *range(8)], of_group(str(i)))
    assert pool.num_retained == 40
    num_states, num_in_windows = pool.num_retained_beside
    assert num_states == 4
    # A window begins to give way before its end.
    assert 8 <= num_in_windows <= 17
    pool.serve(LONG)
    pool.serve([5, *LONG])
    assert pool.serve(LONG) == 20
    assert pool.serve([119, *range(8)]) == 8


def test_what_is_over_is_over_in_all_pools() -> None:
    pool = Pool(num_blocks=400, **BOTH)
    pool.serve(LONG, SESSION)
    pool.now = 299
    pool.flood(20)
    assert pool.num_retained_beside == (1, 2)
    pool.now = 301
    pool.flood(20)
    assert (pool.num_retained, pool.num_retained_beside) == (0, (0, 0))
    # Its blocks are still there, but no state.
    assert pool.serve(LONG) == 0


def test_what_gives_way_does_in_all_pools() -> None:
    """Of three sessions the main pool retains two and the beginning of another."""
    pool = Pool(**BOTH | {"num_checkpoints": 20, "num_window_blocks": 100})
    for i in range(3):
        pool.serve([100 + i, *LONG[1:]], of_group(str(i)))
    assert pool.num_retained == 12
    assert pool.num_retained_beside == (2, 4)


def test_without_a_prefix_cache_nothing_is_retained() -> None:
    pool = Pool(enable_prefix_cache=False, **BOTH)
    pool.serve(LONG, SESSION)
    assert (pool.num_retained, pool.num_retained_beside) == (0, (0, 0))


def test_no_request_waits_for_what_is_retained() -> None:
    """A request that needs all of the pool gets it."""
    pool = Pool()
    for i in range(3):
        pool.serve([100 + i, *LONG[1:]], of_group(str(i)))
    pool.serve([*range(90)])
    assert pool.serve([100, *LONG[1:]]) == 0


def test_what_is_lost_is_not_retained() -> None:
    pool = Pool()
    pool.serve(LONG, SESSION)
    pool.scheduler._kv.forget_cached()
    assert pool.num_retained == 0
    assert pool.serve(LONG) == 0


def test_a_request_that_was_aborted_retains_what_it_has_computed() -> None:
    pool = Pool(max_num_batched_tokens=8)
    spec = make_request(0, LONG, max_tokens=2).spec
    request = BatchRequest(77, replace(spec, retention=SESSION), seed=0)
    pool.scheduler.add(request)
    plan = pool.scheduler.schedule(None, inf, UNLIMITED, now=0.0)
    pool.scheduler.update(plan, pool.runner.run(plan))
    pool.scheduler.abort(request)
    assert pool.num_retained == 2


def test_the_store_keeps_what_is_retained_for_as_long() -> None:
    store = FakeStore()
    pool = Pool(store)
    pool.serve(LONG, SESSION)
    assert marks(store) == [(5, 300)]
    pool.serve([*range(1, 60)], SESSION)
    # What gave way is stored like any other.
    assert marks(store) == [(5, 300), (15, 300), (9, None)]


def test_the_store_knows_what_gave_way_to_a_request_that_is_not_stored() -> None:
    store = FakeStore()
    pool = Pool(store)
    pool.serve([*range(60)], SESSION)
    before = len(store.used)
    for start in (100, 200):
        pool.serve([*range(start, start + 40)], of_group(str(start))._replace(may_store=False))
    gave_way = [each for hashes, _ in store.used[before:] for each in hashes]
    assert gave_way
    assert {seconds for _, seconds in store.used[before:]} == {None}
    assert {*gave_way} & {*store.used[0][0]}


def marks(store: FakeStore) -> list[tuple[int, float | None]]:
    """Return how many blocks were marked as used each time, and until when."""
    return [(len(hashes), seconds) for hashes, seconds in store.used]


def test_the_store_knows_what_is_used_in_the_pool() -> None:
    """What is never read since it is always there must not be the first to be deleted."""
    store = FakeStore()
    pool = Pool(store)
    pool.serve(LONG)
    pool.serve([*LONG[:16], 99])
    assert marks(store) == [(5, 0), (4, 0)]
    assert store.used[1][0] == store.used[0][0][:4]


@pytest.mark.parametrize("changes", [{}, STATES])
def test_what_is_to_be_in_memory_only_is_not_stored(changes: dict[str, Any]) -> None:
    for retention in (SESSION._replace(may_store=False), NOT_STORED):
        store = FakeStore()
        pool = Pool(store, **changes)
        pool.serve(LONG, retention)
        assert not store.entries
        assert not store.used
        pool.serve(LONG)
        pool.serve([5, *LONG])
        assert store.entries


def test_one_look_a_second_is_enough() -> None:
    retained = RetainedBlocks(8)
    assert retained.retain(Group("", "a", 1), [], now=0) == []
    hashes = [BlockHash(bytes([i]) * 32) for i in range(2)]
    assert retained.retain(Group("", "a", 0.5), hashes[:1], now=0) == []
    assert retained.expire(0) == []
    assert retained.expire(0.9) == []
    assert retained.expire(1) == hashes[:1]
    assert hashes[0] not in retained
    assert len(retained) == 0
