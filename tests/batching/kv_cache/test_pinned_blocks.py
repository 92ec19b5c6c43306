"""Pinned blocks stay: neither time nor what is retained later takes their place."""

from math import inf

from batching.block_manager import BlockHash
from batching.kv_cache.retained_blocks import Group, RetainedBlocks


def hashes(name: str, num_blocks: int) -> list[BlockHash]:
    return [BlockHash(f"{name}{index}".encode()) for index in range(num_blocks)]


def kept(retained: RetainedBlocks, name: str, num_blocks: int) -> int:
    return sum(each in retained for each in hashes(name, num_blocks))


def test_what_does_not_fit_is_not_pinned_from_the_end_of_its_prefix() -> None:
    retained = RetainedBlocks(12)
    assert retained.retain(Group("", "a", inf), hashes("x", 4), 0.0) == []
    assert retained.retain(Group("", "b", inf), hashes("y", 4), 1.0) == hashes("y", 4)[2:]
    assert retained.retain(Group("", "a", inf), hashes("z", 1), 2.0) == hashes("z", 1)
    assert retained.num_pinned == retained.max_pinned == len(retained) == 6
    assert kept(retained, "x", 4) == 4


def test_sessions_push_out_each_other_but_nothing_that_is_pinned() -> None:
    retained = RetainedBlocks(8)
    retained.retain(Group("", "a", inf), hashes("x", 4), 0.0)
    retained.retain(Group("", "s", 60.0), hashes("y", 4), 1.0)
    given_way = retained.retain(Group("", "t", 60.0), hashes("z", 5), 2.0)
    assert given_way == [*hashes("z", 5)[4:], *reversed(hashes("y", 4))]
    assert [kept(retained, *each) for each in (("x", 4), ("y", 4), ("z", 5))] == [4, 0, 4]
    retained.expire(1e9)
    assert len(retained) == retained.num_pinned == 4


def test_a_prefix_is_pinned_once_whoever_retains_it_too() -> None:
    retained = RetainedBlocks(12)
    for name, seconds in (("s", 60.0), ("a", inf), ("a", inf), ("b", inf), ("s", 60.0)):
        assert retained.retain(Group("", name, seconds), hashes("x", 3), 0.0) == []
        retained.retain(Group("", name, seconds), [], 0.0)
    assert (retained.num_pinned, len(retained)) == (3, 3)
    retained.retain(Group("", "s", 60.0), hashes("y", 4), 0.0)
    # Those that do not fit stay in their session.
    assert retained.retain(Group("", "a", inf), hashes("y", 4), 0.0) == []
    assert (retained.num_pinned, len(retained)) == (6, 7)


def test_what_is_dropped_was_not_pinned() -> None:
    retained = RetainedBlocks(8)
    retained.retain(Group("", "a", inf), hashes("x", 2), 0.0)
    retained.retain(Group("", "a", 60.0), hashes("y", 2), 0.0)
    assert retained.drop([*hashes("x", 2), *hashes("y", 1), *hashes("z", 1)]) == hashes("y", 1)
    assert (retained.num_pinned, len(retained)) == (2, 3)


def test_what_is_lost_makes_room() -> None:
    retained = RetainedBlocks(4)
    retained.retain(Group("", "a", inf), hashes("x", 2), 0.0)
    retained.forget()
    assert retained.retain(Group("", "a", inf), hashes("y", 2), 0.0) == []
    assert (retained.num_pinned, len(retained)) == (2, 2)
