"""A model of the checkpoints in plain lists, against which every step is checked."""

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batching.block_manager import BlockHash
from batching.kv_cache.state_checkpoints import StateCheckpoints

NAMES = st.sampled_from("abcdefgh")
FIRST_SLOT = 3


def block_hash(name: str) -> BlockHash:
    return BlockHash(name.encode())


class CheckpointMachine(RuleBasedStateMachine):
    @initialize(num_slots=st.integers(0, 4))
    def begin(self, num_slots: int) -> None:
        self.slots = range(FIRST_SLOT, FIRST_SLOT + num_slots)
        self.checkpoints = StateCheckpoints(self.slots)
        # What each slot contains, as a runner would know it, and names by their use.
        self.contents: dict[int, str] = {}
        self.used: list[str] = []
        self.wanted: list[str] = []
        self.retained: set[str] = set()
        self.counts = {"stored": 0, "hit": 0, "evicted": 0}

    def touch(self, name: str) -> None:
        self.used = [*(n for n in self.used if n != name), name]

    @precondition(lambda self: self.slots)
    @rule(name=NAMES)
    def store(self, name: str) -> None:
        slot = self.checkpoints.store(block_hash(name))
        assert (slot is None) == (name in self.used)
        self.touch(name)
        if slot is None:
            return
        self.counts["stored"] += 1
        self.contents[slot] = name
        self.wanted = [n for n in self.wanted if n != name]
        if len(self.used) > len(self.slots):
            # The new one is the last, and others go before those that are retained.
            evicted = min(self.used[:-1], key=lambda n: n in self.retained)
            self.used.remove(evicted)
            self.retained.discard(evicted)
            self.counts["evicted"] += 1

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.used))
        assert self.contents[self.checkpoints.use(block_hash(name))] == name
        self.touch(name)
        self.counts["hit"] += 1

    @rule(name=NAMES)
    def want(self, name: str) -> None:
        self.checkpoints.want(block_hash(name))
        if name in self.used:
            self.touch(name)
        else:
            wanted = [*(n for n in self.wanted if n != name), name]
            self.wanted = wanted[max(0, len(wanted) - len(self.slots)) :]

    @rule(name=NAMES, is_retained=st.booleans())
    def retain(self, name: str, is_retained: bool) -> None:
        self.checkpoints.retain(block_hash(name), is_retained=is_retained)
        if is_retained and name in self.used:
            self.retained.add(name)
        else:
            self.retained.discard(name)

    @rule()
    def forget(self) -> None:
        self.checkpoints.forget()
        self.used.clear()
        self.retained.clear()
        self.contents.clear()

    @rule(names=st.lists(NAMES))
    def look_up(self, names: list[str]) -> None:
        ends = [i + 1 for i, name in enumerate(names) if name in self.used]
        assert self.checkpoints.num_usable(list(map(block_hash, names))) == max(ends, default=0)

    @invariant()
    def each_hash_has_a_slot_of_its_own(self) -> None:
        assert len(self.checkpoints) == len(self.used) <= len(self.slots)
        assert set(self.contents) <= set(self.slots)
        found = [n for n in "abcdefgh" if self.checkpoints.find(block_hash(n)) is not None]
        assert found == sorted(self.used)

    @invariant()
    def few_are_wanted_and_none_of_those_that_are_there(self) -> None:
        wanted = [n for n in "abcdefgh" if self.checkpoints.is_wanted(block_hash(n))]
        assert wanted == sorted(self.wanted)
        assert len(wanted) <= len(self.slots)
        assert not set(wanted) & set(self.used)

    @invariant()
    def everything_is_counted(self) -> None:
        c = self.checkpoints
        assert self.counts == {
            "stored": c.num_stored,
            "hit": c.num_hit,
            "evicted": c.num_evicted,
        }


CheckpointMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None
)
TestCheckpoints = CheckpointMachine.TestCase


def test_the_least_recently_used_checkpoint_is_evicted() -> None:
    checkpoints = StateCheckpoints(range(4, 6))
    assert [checkpoints.store(block_hash(name)) for name in "ab"] == [4, 5]
    checkpoints.use(block_hash("a"))
    assert checkpoints.store(block_hash("c")) == 5
    assert checkpoints.num_usable([block_hash("b")]) == 0


def test_a_retained_checkpoint_is_evicted_when_all_are() -> None:
    checkpoints = StateCheckpoints(range(2))
    for name in "ab":
        checkpoints.store(block_hash(name))
    checkpoints.retain(block_hash("a"))
    checkpoints.store(block_hash("c"))
    assert [checkpoints.find(block_hash(name)) for name in "abc"] == [0, None, 1]
    checkpoints.retain(block_hash("c"))
    checkpoints.store(block_hash("d"))
    assert [checkpoints.find(block_hash(name)) for name in "acd"] == [None, 1, 0]
    checkpoints.retain(block_hash("c"), is_retained=False)
    checkpoints.store(block_hash("e"))
    assert [checkpoints.find(block_hash(name)) for name in "cde"] == [None, 0, 1]


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_checkpoint_that_is_gone_is_not_retained_when_it_is_stored_again(
    is_forgotten: bool,
) -> None:
    checkpoints = StateCheckpoints(range(2))
    for name in "ab":
        checkpoints.store(block_hash(name))
        checkpoints.retain(block_hash(name))
    if is_forgotten:
        checkpoints.forget()
    checkpoints.store(block_hash("c"))
    checkpoints.retain(block_hash("b"), is_retained=False)
    checkpoints.store(block_hash("a"))
    checkpoints.retain(block_hash("c"))
    checkpoints.store(block_hash("d"))
    assert [checkpoints.find(block_hash(name)) is None for name in "acd"] == [True, False, False]
