"""What is retained is bounded, over in time, and gives way from the end of a prefix."""

from collections import Counter
from typing import Final

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from batching.block_manager import BlockHash
from batching.kv_cache.retained_blocks import Group, RetainedBlocks

NUM_BLOCKS: Final = 10
# Of seconds; looks for what is over are a second apart.
TIMES: Final = st.sampled_from([0.5, 2.0, 5.0])


def block_hash(number: int) -> BlockHash:
    return BlockHash(bytes([number]))


def numbers(hashes: list[BlockHash]) -> list[int]:
    return [each[0] for each in hashes]


class RetainedMachine(RuleBasedStateMachine):
    """Prefixes of ten blocks, with a plain record of who may have what, and until when.

    `until` has all that is retained; `used` has the numbers of the last uses of groups, and `used_by` those of clients.
    """

    @initialize(max_blocks=st.integers(0, NUM_BLOCKS))
    def begin(self, max_blocks: int) -> None:
        self.retained = RetainedBlocks(max_blocks)
        self.max_blocks = max_blocks
        self.now = 0.0
        self.last_look: float | None = None
        self.until: dict[int, float] = {}
        self.group: dict[int, Group] = {}
        self.order: list[int] = []
        self.used: dict[Group, int] = {}
        self.used_by: dict[str, int] = {}
        self.num_uses = 0

    def drop(self, number: int) -> None:
        self.order.remove(number)
        del self.until[number], self.group[number]

    def first_of(self, group: Group) -> int:
        return next(each for each in self.order if self.group[each] == group)

    @rule(
        client=st.sampled_from("xy"),
        name=st.sampled_from("ab"),
        first=st.integers(0, NUM_BLOCKS),
        num=st.integers(0, NUM_BLOCKS),
        seconds=TIMES,
    )
    def retain(self, client: str, name: str, first: int, num: int, seconds: float) -> None:
        group, until = Group(client, name, seconds), self.now + seconds
        prefix = list(range(NUM_BLOCKS))[first : first + num]
        given_way = self.retained.retain(group, list(map(block_hash, prefix)), self.now)
        taken = [
            each
            for each in prefix
            if self.group.get(each) == group or self.until.get(each, 0.0) <= until
        ]
        self.num_uses += 1
        for each in reversed(taken):
            if each in self.until:
                self.drop(each)
            self.until[each], self.group[each] = until, group
            self.order.append(each)
            self.used[group] = self.used_by[client] = self.num_uses
        assert numbers(given_way) == list(self._give_way(group))

    def _give_way(self, group: Group) -> list[int]:
        gone: list[int] = []
        while list(self.group.values()).count(group) > self.max_blocks // 2:
            gone.append(self.first_of(group))
            self.drop(gone[-1])
        while len(self.order) > self.max_blocks:
            # Of who has most, or else of who has used it least recently.
            num_of = Counter(each.client for each in self.group.values())
            client = min(num_of, key=lambda each: (-num_of[each], self.used_by[each]))
            groups = {each for each in self.group.values() if each.client == client}
            gone.append(self.first_of(min(groups, key=self.used.__getitem__)))
            self.drop(gone[-1])
        return gone

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        over = numbers(self.retained.expire(self.now))
        expected: set[int] = set()
        if self.last_look is None or self.now - self.last_look >= 1:
            self.last_look = self.now
            expected = {each for each, until in self.until.items() if until <= self.now}
        assert sorted(over) == sorted(expected)
        for each in over:
            self.drop(each)

    @rule(dropped=st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, max_size=3))
    def end(self, dropped: list[int]) -> None:
        expected = [each for each in dropped if each in self.until]
        assert numbers(self.retained.drop(list(map(block_hash, dropped)))) == expected
        for each in expected:
            self.drop(each)

    @rule()
    def forget(self) -> None:
        self.retained.forget()
        for each in [*self.order]:
            self.drop(each)

    @invariant()
    def it_has_what_it_says(self) -> None:
        found = [i for i in range(NUM_BLOCKS) if block_hash(i) in self.retained]
        assert found == sorted(self.until)
        assert len(self.retained) == len(found) <= self.max_blocks

    @invariant()
    def no_group_has_more_than_half(self) -> None:
        for group in {*self.group.values()}:
            assert list(self.group.values()).count(group) <= self.max_blocks // 2


RetainedMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None
)
TestRetained = RetainedMachine.TestCase


def test_a_prefix_gives_way_from_its_end() -> None:
    retained = RetainedBlocks(4)
    hashes = list(map(block_hash, range(4)))
    assert numbers(retained.retain(Group("", "a", 5), hashes[:3], now=0)) == [2]
    assert numbers(retained.retain(Group("", "b", 5), hashes[3:], now=1)) == []
    assert numbers(retained.retain(Group("", "c", 5), hashes[2:3], now=2)) == []
    # Of the group that was used least recently.
    assert numbers(retained.retain(Group("", "d", 5), [block_hash(9)], now=3)) == [1]


def test_who_retains_a_block_for_longest_has_it() -> None:
    retained = RetainedBlocks(8)
    shared = [block_hash(0)]
    retained.retain(Group("", "a", 60), shared, now=0)
    retained.retain(Group("", "b", 5), shared, now=10)
    assert retained.expire(30) == []
    retained.retain(Group("", "b", 5), shared, now=58)
    assert retained.expire(61) == []
    assert retained.expire(63) == shared
    assert retained.expire(70) == []


def test_the_group_that_was_used_least_recently_gives_way() -> None:
    retained = RetainedBlocks(2)
    first, second, third = (block_hash(i) for i in range(3))
    retained.retain(Group("", "a", 5), [first], now=0)
    retained.retain(Group("", "b", 5), [second], now=1)
    retained.retain(Group("", "a", 5), [first], now=2)
    assert retained.retain(Group("", "c", 5), [third], now=3) == [second]


def test_many_sessions_of_a_client_take_nothing_from_the_share_of_another() -> None:
    retained = RetainedBlocks(12)
    mine = list(map(block_hash, range(6)))
    retained.retain(Group("one", "a", 60), mine, now=0)
    for i in range(6):
        # Those of others give way only where one has more than they have.
        retained.retain(Group("two", str(i), 60), [block_hash(10 + 3 * i + j) for j in range(3)], 1)
        assert all(each in retained for each in mine)
    assert len(retained) == 12
    # A third client has its share of both.
    given_way = retained.retain(Group("three", "a", 60), list(map(block_hash, range(40, 44))), 2)
    assert sorted(numbers(given_way))[:2] == [4, 5]
    assert sum(each in retained for each in mine) == 4
