"""A table of cases as one test."""

import inspect
from collections.abc import Callable

import pytest

from tests.support.rows import rows

seen: list[tuple[int, int]] = []


@rows(("first", "second"), [(1, 2), (3, 3), (4, 5)])
def is_ordered(limit: int, first: int, second: int) -> None:
    seen.append((first, second))
    assert limit > first < second


@rows("number", [1, 2])
async def is_odd(number: int) -> None:
    assert number % 2 == 1


def failures_of(test: Callable[[], object]) -> list[str]:
    with pytest.raises(ExceptionGroup) as caught:
        test()
    return [note for error in caught.value.exceptions for note in error.__notes__]


def test_all_rows_are_tried_and_those_that_fail_are_named() -> None:
    seen.clear()
    assert failures_of(lambda: is_ordered(limit=4)) == [
        "in the row {'first': 3, 'second': 3}",
        "in the row {'first': 4, 'second': 5}",
    ]
    assert seen == [(1, 2), (3, 3), (4, 5)]


@pytest.mark.anyio
async def test_a_row_may_be_awaited() -> None:
    with pytest.raises(ExceptionGroup, match="1 of 2 rows"):
        await is_odd()


def test_fixtures_are_the_other_parameters() -> None:
    assert list(inspect.signature(is_ordered).parameters) == ["limit"]
