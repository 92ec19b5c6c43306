from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batching.block_manager import (
    BlockCopy,
    BlockHash,
    BlockTable,
    NoFreeBlocks,
    PagedBlockManager,
    Run,
)
from batching.blocks.block_ages import NO_AGES, BlockAgeRecorder
from batching.prefix_cache import HashChain, PrefixCache

NUM_BLOCKS: Final = 8
BLOCK_SIZE: Final = 2


def num_common(tokens: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(tokens, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(other)))


class Holder:
    """A request as the block manager sees it: tokens, and a table over them."""

    def __init__(self, token_ids: list[int], table: BlockTable) -> None:
        self.token_ids = token_ids
        self.table = table
        self.chain = HashChain()
        self.num_published = 0


class ExpectedAges:
    """The ages of a pool, from what can be seen of it: what is found, and what is in use.

    `evicted` is (lifetime, idle time) of what was lost, `reuse_gaps` of what was taken again.
    """

    def __init__(self, manager: PagedBlockManager) -> None:
        self._manager = manager
        self._published: dict[BlockHash, float] = {}
        self._released: dict[BlockHash, float] = {}
        self.evicted: list[tuple[float, float]] = []
        self.reuse_gaps: list[float] = []

    def note(self) -> None:
        """Look at the pool; to be called before time passes and before anything can be lost."""
        for block in self._manager.blocks:
            if block.block_hash is not None:
                self._published.setdefault(block.block_hash, self._manager.now)
                if block.ref_count:
                    self._released.pop(block.block_hash, None)
                else:
                    self._released.setdefault(block.block_hash, self._manager.now)

    @contextmanager
    def losing(self) -> Iterator[None]:
        """Expect the ages of the cached blocks that are gone after what is done within."""
        self.note()
        yield
        for block_hash in [h for h in self._published if self._manager.find(h) is None]:
            published = self._published.pop(block_hash)
            if (released := self._released.pop(block_hash, None)) is not None:
                now = self._manager.now
                self.evicted.append((now - published, now - released))

    def take(self, block_ids: Sequence[int]) -> None:
        """Expect the gaps of those blocks that have no reference."""
        self.note()
        for block_id in block_ids:
            block = self._manager.blocks[block_id]
            if block.block_hash is not None and block.ref_count == 0:
                self.reuse_gaps.append(self._manager.now - self._released.pop(block.block_hash))


class EvictionOrder:
    """Which blocks without a reference go first, as one sees it: others before those that are retained."""

    def __init__(self, manager: PagedBlockManager) -> None:
        self._manager = manager
        self.retained: set[BlockHash] = set()

    def cached(self) -> set[BlockHash]:
        blocks = self._manager.blocks
        return {b.block_hash for b in blocks if b.block_hash and not b.ref_count}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Expect that nothing which is retained is evicted within while there is something else."""
        before = self.cached()
        yield
        found = self._manager.find
        gone = {block_hash for block_hash in before if found(block_hash) is None}
        if gone & self.retained:
            assert before - self.retained <= gone
        self.retained = {
            block_hash for block_hash in self.retained if found(block_hash) is not None
        }


class BlockMachine(RuleBasedStateMachine):
    """Requests over two tokens, so that prefixes collide; the pool remembers what was written.

    The model is the plain one: a list of holders, and for each block the tokens it holds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.manager = PagedBlockManager(NUM_BLOCKS, BLOCK_SIZE)
        self.cache = PrefixCache(self.manager)
        self.holders: list[Holder] = []
        self.written: dict[int, tuple[int, ...]] = {}
        self.expected = ExpectedAges(self.manager)
        self.order = EvictionOrder(self.manager)

    @contextmanager
    def evicting(self) -> Iterator[None]:
        """Expect what follows from evictions within, and no other ones."""
        with self.expected.losing(), self.order.kept():
            yield

    @rule(seconds=st.integers(1, 9))
    def wait(self, seconds: int) -> None:
        self.expected.note()
        self.manager.now += seconds

    def write(self, holder: Holder, start: int) -> None:
        for index in range(start, len(holder.table)):
            tokens = holder.token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
            block_id = holder.table.block_ids[index]
            assert self.manager.blocks[block_id].ref_count == 1, "only the owner writes"
            self.written[block_id] = tuple(tokens)

    def publish(self, holder: Holder) -> None:
        hashes = holder.chain.extended(holder.token_ids, BLOCK_SIZE)
        start, stop = holder.num_published, len(hashes)
        blocks = [
            holder.token_ids[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE] for i in range(start, stop)
        ]
        contents = [holder.chain.contents(start + i, block) for i, block in enumerate(blocks)]
        self.cache.insert(hashes, holder.table, start, stop, contents)
        holder.num_published = stop

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=7))
    def admit(self, token_ids: list[int]) -> None:
        holder = Holder(token_ids, BlockTable())
        hashes = holder.chain.extended(token_ids, BLOCK_SIZE)
        cached = self.cache.lookup(hashes[: (len(token_ids) - 1) // BLOCK_SIZE])
        self.expected.take(cached)
        for index, block_id in enumerate(cached):
            expected = token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
            assert self.written[block_id] == tuple(expected), "a hit holds that very prefix"
            self.manager.increment_ref(block_id)
        holder.table.extend(cached)
        missing = self.manager.blocks_for(len(token_ids)) - len(cached)
        free = self.manager.num_free_blocks
        with self.evicting():
            block_ids = self.manager.allocate(missing, holder.table.last_block)
        if block_ids is None:
            assert missing > free
            self.manager.release(cached)
            return
        holder.table.extend(block_ids)
        self.holders.append(holder)
        self.write(holder, len(cached))
        self.publish(holder)

    @precondition(lambda self: self.holders)
    @rule(token_id=st.integers(0, 1), data=st.data())
    def append(self, token_id: int, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        index = len(holder.token_ids) // BLOCK_SIZE
        if index == len(holder.table):
            with self.evicting():
                taken = self.manager.allocate(1, holder.table.last_block)
            if taken is None:
                assert self.manager.num_free_blocks == 0
                return
            holder.table.extend(taken)
        else:
            try:
                with self.evicting():
                    copy = self.manager.make_writable(holder.table, index)
            except NoFreeBlocks:
                assert self.manager.num_free_blocks == 0
                return
            if copy is not None:
                self.written[copy.target] = self.written[copy.source]
        holder.token_ids = [*holder.token_ids, token_id]
        self.write(holder, index)
        self.publish(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.holders))
        child = Holder(parent.token_ids, self.manager.fork(parent.table))
        child.num_published = parent.num_published
        self.holders.append(child)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        self.manager.release(holder.table.block_ids)

    @rule(data=st.data(), is_retained=st.booleans())
    def retain(self, data: st.DataObject, is_retained: bool) -> None:
        known = [b.block_hash for b in self.manager.blocks if b.block_hash]
        block_hash = data.draw(st.sampled_from([*known, *hashes("unknown")]))
        free, cached = self.manager.num_free_blocks, self.order.cached()
        self.manager.retain(block_hash, is_retained=is_retained)
        assert self.manager.num_free_blocks == free
        assert self.order.cached() == cached
        if is_retained and block_hash in known:
            self.order.retained.add(block_hash)
        else:
            self.order.retained.discard(block_hash)

    @rule()
    def forget(self) -> None:
        with self.evicting():
            self.manager.forget_cached()
        assert self.manager.num_cached_blocks == 0

    @invariant()
    def each_block_is_in_one_state(self) -> None:
        in_use: dict[int, int] = {}
        for holder in self.holders:
            for block_id in holder.table.block_ids:
                in_use[block_id] = in_use.get(block_id, 0) + 1
        blocks = self.manager.blocks
        assert {b.block_id: b.ref_count for b in blocks if b.ref_count} == in_use
        assert self.manager.num_free_blocks == NUM_BLOCKS - len(in_use)
        cached = [b for b in blocks if not b.ref_count and b.block_hash]
        assert self.manager.num_cached_blocks == len(cached)

    @rule()
    def tell_the_ages(self) -> None:
        ages = self.manager.take_ages()
        assert sorted(zip(ages.lifetimes, ages.idle_times, strict=True)) == sorted(
            self.expected.evicted
        )
        assert list(ages.reuse_gaps) == self.expected.reuse_gaps
        self.expected.evicted.clear()
        self.expected.reuse_gaps.clear()

    @invariant()
    def blocks_with_contents_are_those_that_follow_their_parents(self) -> None:
        following = {
            parent: sorted((list(tokens), block_id) for tokens, block_id in each._entries)
            for parent, each in self.manager._by_parent.items()
        }
        expected: dict[BlockHash, list[tuple[list[int], int]]] = {}
        for block in self.manager.blocks:
            assert (block.contents is None) == (block.block_hash is None)
            if block.contents is not None:
                entry = (list(block.contents.tokens), block.block_id)
                expected.setdefault(block.contents.parent, []).append(entry)
        assert following == {parent: sorted(entries) for parent, entries in expected.items()}

    @invariant()
    def a_hash_leads_home(self) -> None:
        for block in self.manager.blocks:
            if block.block_hash is not None:
                assert self.manager.find(block.block_hash) == block.block_id

    @precondition(lambda self: self.holders)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=BLOCK_SIZE), data=st.data())
    def look_for_a_beginning(self, tokens: list[int], data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        index = data.draw(st.integers(0, holder.num_published))
        holder.chain.extended(holder.token_ids, BLOCK_SIZE)
        contents = holder.chain.contents(index, tokens)
        following = [
            (num_common(tokens, self.written[block.block_id]), block.block_id)
            for block in self.manager.blocks
            if block.contents is not None and block.contents.parent == contents.parent
        ]
        num_tokens, block_id = self.manager.find_beginning(contents)
        assert num_tokens == max([0, *(n for n, _ in following)])
        assert (num_tokens, block_id) in [*following, (0, -1)]

    @invariant()
    def every_request_reads_its_own_tokens(self) -> None:
        for holder in self.holders:
            tokens = [t for b in holder.table.block_ids for t in self.written[b]]
            assert tokens == holder.token_ids

    @invariant()
    def runs_describe_the_table(self) -> None:
        for holder in self.holders:
            ids = [r.first_block + i for r in holder.table.runs for i in range(r.num_blocks)]
            assert ids == holder.table.block_ids

    def teardown(self) -> None:
        self.tell_the_ages()
        for holder in self.holders:
            self.manager.release(holder.table.block_ids)
        assert self.manager.num_free_blocks == NUM_BLOCKS


BlockMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestBlocks = BlockMachine.TestCase


def hashes(*names: str) -> list[BlockHash]:
    return [BlockHash(name.encode()) for name in names]


def test_a_table_grows_in_place() -> None:
    manager = PagedBlockManager(64, 4)
    tables = [BlockTable(manager.allocate(2) or ()) for _ in range(3)]
    for table in tables * 2:
        table.extend(manager.allocate(1, table.last_block) or ())
    assert [len(table.runs) for table in tables] == [1, 1, 1]


def test_allocation_is_all_or_nothing() -> None:
    manager = PagedBlockManager(4, 4)
    assert manager.allocate(3) == [0, 1, 2]
    assert manager.allocate(2) is None
    assert manager.num_free_blocks == 1
    assert manager.allocate(0) == []


def test_the_least_recently_released_is_evicted_first_and_its_tail_before_its_head() -> None:
    manager = PagedBlockManager(4, 4)
    for names in (("a", "b"), ("c", "d")):
        block_ids = manager.allocate(2) or []
        for block_id, block_hash in zip(block_ids, hashes(*names), strict=True):
            manager.publish(block_id, block_hash)
        manager.release(block_ids)
    left = []
    for _ in range(4):
        manager.allocate(1)
        left.append("".join(n for n in "abcd" if manager.find(hashes(n)[0]) is not None))
    assert left == ["acd", "cd", "c", ""]
    assert manager.num_evictions == 4


def test_retained_blocks_are_evicted_behind_all_others() -> None:
    manager = PagedBlockManager(4, 4)
    block_ids = manager.allocate(4) or []
    for block_id, block_hash in zip(block_ids, hashes(*"abcd"), strict=True):
        manager.publish(block_id, block_hash)
    # Before and after they are let go.
    manager.retain(hashes("d")[0])
    manager.release(block_ids)
    manager.retain(hashes("c")[0])
    manager.retain(hashes("b")[0])
    manager.retain(hashes("b")[0], is_retained=False)
    left = []
    for _ in range(4):
        manager.allocate(1)
        left.append("".join(n for n in "abcd" if manager.find(hashes(n)[0]) is not None))
    assert left == ["bcd", "cd", "c", ""]
    assert manager.num_free_blocks == 0


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_what_comes_to_the_place_of_a_retained_block_is_not_retained(is_forgotten: bool) -> None:
    manager = PagedBlockManager(2, 4)

    def fill(name: str) -> list[int]:
        block_ids = manager.allocate(1) or []
        manager.publish(block_ids[0], hashes(name)[0])
        return block_ids

    for name in "ab":
        block_ids = fill(name)
        manager.retain(hashes(name)[0])
        if name == "a" or not is_forgotten:
            manager.release(block_ids)
    if is_forgotten:
        # One is in use.
        manager.forget_cached()
        manager.publish(block_ids[0], hashes("c")[0])
        manager.release(block_ids)
    else:
        manager.release(fill("c"))
    manager.release(fill("d"))
    manager.retain(hashes("d")[0])
    manager.touch(manager.find(hashes("c")[0]) or 0)
    fill("e")
    assert [manager.find(hashes(name)[0]) is None for name in "cd"] == [True, False]


def test_what_is_said_to_go_first_does() -> None:
    manager = PagedBlockManager(num_blocks=4, block_size=4)
    hashes = HashChain().extended(list(range(16)), 4)
    block_ids = manager.allocate(4) or []
    for block_id, block_hash in zip(block_ids, hashes, strict=True):
        manager.publish(block_id, block_hash)
    manager.release(block_ids[:2])
    manager.release(block_ids[2:3], evict_first=True)
    manager.release(block_ids[3:])
    manager.allocate(2)
    assert [manager.find(h) is not None for h in hashes] == [True, False, False, True]


def test_a_table_that_drops_blocks_keeps_the_indices_of_the_others() -> None:
    table = BlockTable([5, 6, 7, 2])
    assert table.drop(1) == [5]
    assert table.drop(3) == [6, 7]
    table.extend([3])
    assert (table.block_ids, table.held, table.runs) == ([2, 2, 2, 2, 3], [2, 3], [Run(2, 2)])
    table.replace(3, 9)
    assert (table.block_ids, table.held) == ([9, 9, 9, 9, 3], [9, 3])
    table.clear()
    assert (len(table), table.num_dropped) == (0, 0)


def test_a_cached_block_in_use_is_not_evicted() -> None:
    manager = PagedBlockManager(2, 4)
    block_ids = manager.allocate(2) or []
    manager.publish(block_ids[0], hashes("a")[0])
    manager.release(block_ids)
    manager.increment_ref(block_ids[0])
    assert manager.allocate(2) is None
    assert manager.allocate(1) == [block_ids[1]]
    assert manager.find(hashes("a")[0]) == block_ids[0]


def test_equal_contents_are_found_once() -> None:
    manager = PagedBlockManager(2, 4)
    first, second = manager.allocate(2) or []
    manager.publish(first, hashes("a")[0])
    manager.publish(second, hashes("a")[0])
    manager.release([first, second])
    assert manager.find(hashes("a")[0]) == first
    assert manager.num_cached_blocks == 1


def test_eviction_in_a_batch_leaves_runs_and_not_holes() -> None:
    manager = PagedBlockManager(256, 4)
    for start in range(0, 256, 16):
        block_ids = manager.allocate(16) or []
        for i, block_id in enumerate(block_ids):
            manager.publish(block_id, BlockHash(bytes([start // 16, i])))
        manager.release(block_ids)
    taken = BlockTable(manager.allocate(1) or ())
    for _ in range(3):
        taken.extend(manager.allocate(1, taken.last_block) or ())
    assert taken.runs == [Run(taken.block_ids[0], 4)]


def test_a_shared_block_is_copied_before_it_is_written() -> None:
    manager = PagedBlockManager(3, 4)
    table = BlockTable(manager.allocate(2) or ())
    twin = manager.fork(table)
    assert manager.make_writable(twin, 1) == BlockCopy(source=1, target=2)
    assert (table.block_ids, twin.block_ids) == ([0, 1], [0, 2])
    assert manager.make_writable(twin, 1) is None
    with pytest.raises(NoFreeBlocks):
        manager.make_writable(twin, 0)


def test_a_block_without_references_cannot_be_released_or_shared() -> None:
    manager = PagedBlockManager(2, 4)
    with pytest.raises(AssertionError, match="block 0 is not in use"):
        manager.release([0])
    with pytest.raises(AssertionError, match="block 0 is empty"):
        manager.increment_ref(0)
    with pytest.raises(AssertionError, match="block 0 is not in use"):
        manager.publish(0, hashes("a")[0])


def test_contents_age_from_when_they_can_be_found_and_idle_from_when_they_are_let_go() -> None:
    manager = PagedBlockManager(1, 4)
    manager.now = 1.0
    block_ids = manager.allocate(1) or []
    manager.now = 2.0
    manager.publish(block_ids[0], hashes("a")[0])
    manager.now = 5.0
    manager.release(block_ids)
    manager.now = 9.0
    manager.increment_ref(block_ids[0])
    manager.increment_ref(block_ids[0])
    assert manager.take_ages() == ([], [], [4.0])
    manager.now = 10.0
    manager.release([*block_ids, *block_ids])
    manager.now = 13.0
    manager.allocate(1)
    assert manager.take_ages() == ([11.0], [3.0], [])
    assert manager.take_ages() is NO_AGES


def test_ages_that_are_never_taken_do_not_pile_up() -> None:
    log = BlockAgeRecorder()
    for age in range(10_000):
        log.evicted(age, age)
        log.reused(age)
    first = list(range(4096))
    assert log.take() == (first, first, first)
    log.reused(1.0)
    assert log.take() == ([], [], [1.0])


def test_repr_is_the_blocks() -> None:
    assert repr(BlockTable([3, 4, 9])) == "BlockTable([3, 4, 9])"
