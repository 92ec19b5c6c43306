"""Entries in the host's memory: bounded by bytes, and each is what was put there last."""

from hypothesis import given, strategies as st

from batching.block_store.entry_file import Entry
from batching.block_store.host_blocks import HostBlocks
from tests.support.stored_entries import entry_of

MOST = 100
# An entry has as many bytes as its number says, from more than one can have to none.
NUMBERS = st.sampled_from([0, 20, 30, 50, 100, 101])


def numbered(num_bytes: int) -> Entry:
    return entry_of(num_bytes, num_bytes)


@given(st.lists(st.tuples(st.booleans(), NUMBERS)))
def test_the_least_recently_used_ones_make_room(uses: list[tuple[bool, int]]) -> None:
    host, expected = HostBlocks(MOST), list[int]()
    for is_added, number in uses:
        entry = numbered(number)
        if is_added:
            host.add(entry)
        else:
            found = host.get(entry.key)
            assert (found is not None) == (number in expected)
            assert found is None or found.contents == entry.contents
        if is_added or number in expected:
            expected = [*(each for each in expected if each != number), number]
        while sum(expected) > MOST:
            expected.pop(0)
        assert host.num_bytes == sum(expected)
        assert len(host) == len(expected)
        assert [numbered(each).key in host for each in expected] == [True] * len(expected)


def test_what_is_put_again_replaces_what_was_there() -> None:
    host, entry = HostBlocks(MOST), numbered(30)
    other = Entry(entry.key, entry.parent, entry.token_ids, [b"other"])
    host.add(entry)
    host.add(other)
    assert host.get(entry.key) is other
    assert (len(host), host.num_bytes) == (1, 5)


def test_what_is_forgotten_is_not_there() -> None:
    host = HostBlocks(MOST)
    host.add(numbered(30))
    host.forget_all()
    assert (len(host), host.num_bytes, host.get(numbered(30).key)) == (0, 0, None)
