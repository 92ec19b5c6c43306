from hypothesis import given, strategies as st

from batching.blocks.free_runs import FreeRuns


@given(st.integers(1, 40), st.data())
def test_it_is_a_set_whose_runs_are_maximal(num_blocks: int, data: st.DataObject) -> None:
    runs = FreeRuns(num_blocks)
    free = set(range(num_blocks))
    for _ in range(data.draw(st.integers(0, 60))):
        taken = sorted(set(range(num_blocks)) - free)
        if taken and (not free or data.draw(st.booleans())):
            block_id = data.draw(st.sampled_from(taken))
            runs.put(block_id)
            free.add(block_id)
        else:
            most = data.draw(st.integers(1, 5))
            after = data.draw(st.sampled_from([None, *taken]))
            got = runs.take(most, after)
            assert 1 <= len(got) <= most
            assert free >= set(got)
            if after is not None and after + 1 in free:
                assert got.start == after + 1
            free -= set(got)
        assert len(runs) == len(free)
        found = runs.some_runs(num_blocks)
        assert sorted(i for start, stop in found for i in range(start, stop)) == sorted(free)
        stops = [stop for _, stop in found]
        assert all(start not in stops for start, _ in found), "two runs touch"


def test_a_new_table_begins_far_from_the_one_before_it() -> None:
    runs = FreeRuns(32)
    assert runs.take(2) == range(2)
    second = runs.take(2)
    assert second == range(17, 19)
    # Both can grow in place.
    assert runs.take(1, after=1) == range(2, 3)
    assert runs.take(1, after=18) == range(19, 20)


def test_few_tables_take_a_small_part_of_a_large_pool() -> None:
    runs = FreeRuns(1 << 16)
    assert max(runs.take(2).stop for _ in range(16)) < 300


def test_a_request_for_more_than_a_run_holds_gets_the_run() -> None:
    runs = FreeRuns(8)
    assert runs.take(100) == range(8)
    runs.put(3)
    assert runs.take(2, after=7) == range(3, 4)
