from hypothesis import given, strategies as st

from batching.block_manager import BlockTable, PagedBlockManager
from batching.prefix_cache import HashChain, PrefixCache
from batching.priority_queue import RunningKey

TOKENS = st.lists(st.integers(0, 1), max_size=12)


@given(TOKENS, TOKENS, st.integers(1, 4))
def test_hashes_are_equal_exactly_if_the_whole_prefix_is(
    a: list[int], b: list[int], block_size: int
) -> None:
    hashes_a = HashChain().extended(a, block_size)
    hashes_b = HashChain().extended(b, block_size)
    for index, (hash_a, hash_b) in enumerate(zip(hashes_a, hashes_b, strict=False), start=1):
        stop = index * block_size
        assert (hash_a == hash_b) == (a[:stop] == b[:stop])


@given(TOKENS, st.integers(1, 4), st.data())
def test_a_chain_extended_in_pieces_is_the_chain_of_the_whole(
    tokens: list[int], block_size: int, data: st.DataObject
) -> None:
    chain = HashChain()
    for stop in sorted(data.draw(st.lists(st.integers(0, len(tokens))))):
        chain.extended(tokens[:stop], block_size)
    assert chain.extended(tokens, block_size) == HashChain().extended(tokens, block_size)


def test_an_extra_key_separates_equal_prompts() -> None:
    plain, salted = HashChain(), HashChain(b"tenant")
    assert plain.extended([1, 2], 2) != salted.extended([1, 2], 2)


def test_hashes_outlive_the_process() -> None:
    """With other ones nothing would be found of what is on disk."""
    hashes = HashChain(b"tenant").extended([1, -2, 3, 1 << 17], 2)
    assert [each.hex()[:16] for each in hashes] == ["b5de5904c958fc11", "bd1f7112b4c3c5ca"]


def test_large_token_ids_do_not_collide() -> None:
    assert HashChain().extended([1 << 17], 1) != HashChain().extended([1], 1)


def test_lookup_gives_the_longest_run_from_the_beginning() -> None:
    manager = PagedBlockManager(4, 2)
    cache = PrefixCache(manager)
    hashes = HashChain().extended([1, 2, 3, 4, 5, 6], 2)
    table = BlockTable(manager.allocate(3) or ())
    cache.insert(hashes, table, 0, 1)
    cache.insert(hashes, table, 2, 3)
    assert cache.lookup(hashes) == table.block_ids[:1]
    cache.insert(hashes, table, 1, 2)
    assert cache.lookup(hashes) == table.block_ids


def test_a_block_is_in_flight_until_it_is_inserted_or_its_request_stops() -> None:
    manager = PagedBlockManager(4, 2)
    cache = PrefixCache(manager)
    hashes = HashChain().extended([1, 2, 3, 4], 2)
    first, second, third = (RunningKey(rank=0, due_time=10.0, request_id=i) for i in (7, 8, 9))
    cache.mark_in_flight(hashes, second)
    cache.mark_in_flight(hashes, first)
    cache.clear_in_flight(hashes, second)
    assert [cache.is_in_flight(h, third) for h in hashes] == [True, True]
    cache.insert(hashes, BlockTable(manager.allocate(2) or ()), 0, 1)
    assert [cache.is_in_flight(h, third) for h in hashes] == [False, True]
    cache.clear_in_flight(hashes, first)
    assert not any(cache.is_in_flight(h, third) for h in hashes)


def test_no_request_waits_for_one_that_is_due_later() -> None:
    cache = PrefixCache(PagedBlockManager(4, 2))
    hashes = HashChain().extended([1, 2], 2)
    cache.mark_in_flight(hashes, RunningKey(rank=0, due_time=20.0, request_id=0))
    assert not cache.is_in_flight(hashes[0], RunningKey(rank=0, due_time=1.0, request_id=1))
