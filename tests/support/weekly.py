"""A sample of many cases, another one each week; the rest of them is slow, so that `make test-slow` runs it.

    @pytest.mark.parametrize("name", weekly(ZOO, 20))
    @pytest.mark.parametrize(("family", "pool"), weekly_pairs(FAMILIES, POOLS))

Tests in `tests/conftest.py`'s table take turns as a whole.  The report's head names the week, and so do failures: TEST_WEEK=2026-W48 takes that week's samples again.
"""

import os
import random
from collections.abc import Collection, Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice, product
from typing import Any, Final
from zlib import crc32

import pytest


def this_week() -> str:
    year, week, _ = datetime.now(UTC).isocalendar()
    return f"{year}-W{week:02}"


# Set for the processes of pytest-xdist, too, which must agree on Sunday at midnight.
WEEK: Final = os.environ.setdefault("TEST_WEEK", this_week())


def is_in_turn(name: str, num_weeks: int, week: str = WEEK) -> bool:
    """Return whether a test runs in this week that does in one of so many, on end."""
    year, number = (int(part) for part in week.split("-W"))
    return (crc32(name.encode()) + 53 * year + number) % num_weeks == 0


def weekly(
    cases: Iterable[Any], num: int, *, always: Collection[Any] = (), week: str = WEEK
) -> list[pytest.ParameterSet]:
    """Return parameters of all cases, a tuple for several; `always` and `num` others are not slow."""
    cases = [*cases]
    others = [i for i, case in enumerate(cases) if case not in always]
    rng = random.Random(f"{week} {num} {len(others)}")
    slow = {*others} - {*rng.sample(others, min(num, len(others)))}
    return [_parameters(case, is_slow=i in slow) for i, case in enumerate(cases)]


def weekly_pairs(
    *axes: Iterable[Any], size: int | None = None, week: str = WEEK
) -> list[pytest.ParameterSet]:
    """Return parameters of the product of axes, of which `size` are not slow, or as many as the longest axis has values.

    The sample has all values of an axis that has no more of them than `size`.
    """
    values = [[*axis] for axis in axes]
    # By their places: not all values can be compared.
    places = [range(len(axis)) for axis in values]
    size = size or max(map(len, places))
    rng = random.Random(f"{week} {size} {places}")
    chosen = {*islice(zip(*(_shuffles(axis, rng) for axis in places), strict=True), size)}
    pairs = zip(product(*places), product(*values), strict=True)
    return [_parameters(case, is_slow=at not in chosen) for at, case in pairs]


def _shuffles(places: range, rng: random.Random) -> Iterator[int]:
    while True:
        yield from rng.sample(places, len(places))


def _parameters(case: Any, *, is_slow: bool) -> pytest.ParameterSet:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow if is_slow else ())
