"""Ranks that open a model decide the same, and fail together."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import isnan, nan
from typing import TypeVar

import pytest

from batching.errors import ModelLoadError
from batching.ranks.lockstep.consensus import (
    ALONE,
    Consensus,
    Following,
    Leading,
    first,
    largest,
    smallest,
    union,
)
from tests.support.rank_links import linked

T = TypeVar("T")


def at_all_ranks(func: Callable[[Consensus, int], T], num_ranks: int = 3) -> list[T | Exception]:
    """Call a function at each rank, with its number; return what it returns or raises there."""
    with linked(num_ranks) as links, ThreadPoolExecutor(num_ranks) as threads:
        ranks: list[Consensus] = [Leading(links.leader)]
        ranks += (Following(member) for member in links.members)
        futures = [threads.submit(func, each, rank) for rank, each in enumerate(ranks)]
        return [each.exception() or each.result() for each in futures]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "choice", "chosen"),
    [
        ([[1, 9], [2, 8], [3, 7]], smallest, [1, 7]),
        ([[1.5, 2.0], [0.5, 3.0], [1.0, 1.0]], largest, [1.5, 3.0]),
        ([[[0, 1]], [], [[2, 3]]], union, [[0, 1], [2, 3]]),
        ([True, False, True], all, False),
        (["a", "b", "c"], first, "a"),
    ],
)
def test_all_ranks_take_what_the_first_chooses(
    values: Sequence[T], choice: Callable[[Sequence[T]], T], chosen: T
) -> None:
    found = at_all_ranks(lambda consensus, rank: consensus.choose(values[rank], choice))
    assert found == [chosen] * 3


def test_what_is_no_number_at_one_rank_is_none_at_all() -> None:
    found = at_all_ranks(lambda each, rank: each.choose([nan if rank == 2 else 1.0], largest))
    assert all(isinstance(one, list) and isnan(one[0]) for one in found)


@pytest.mark.parametrize(
    ("error", "line"),
    [(ModelLoadError("no room"), "rank 1: no room"), (OSError("a\nb"), "rank 1: OSError: a b")],
)
def test_if_a_function_fails_at_one_rank_all_fail(error: Exception, line: str) -> None:
    def at(consensus: Consensus, rank: int) -> int:
        def call() -> int:
            if rank == 1:
                raise error
            return rank

        return consensus.each(call)

    found = at_all_ranks(at)
    assert found[1] is error
    assert [(type(each), str(each)) for each in (found[0], found[2])] == [
        (ModelLoadError, line)
    ] * 2


def test_if_a_function_fails_nowhere_each_rank_has_its_own_result() -> None:
    assert at_all_ranks(lambda consensus, rank: consensus.each(lambda: rank)) == [0, 1, 2]


def test_what_must_be_the_same_is_named_by_all_where_it_is_not() -> None:
    found = at_all_ranks(lambda each, rank: each.check_same("a device", "GPU" if rank else "CPU"))
    assert [(type(each), str(each)) for each in found] == [
        (ModelLoadError, "rank 1 has a device GPU, rank 0 has CPU")
    ] * 3
    assert at_all_ranks(lambda each, rank: each.check_same("a device", "CPU")) == [None] * 3


def test_a_process_alone_asks_no_other() -> None:
    assert ALONE.is_alone
    assert ALONE.choose([3], smallest) == [3]
    assert ALONE.each(lambda: 4) == 4
    with pytest.raises(OSError, match="as it is"):
        ALONE.each(fail)


def fail() -> None:
    raise OSError("as it is")
