"""A sample of many cases, another one each week; the rest of them is slow, so that `make test-slow` runs it.

    @pytest.mark.parametrize("name", weekly(ZOO, 20))
    @pytest.mark.parametrize(("family", "pool"), weekly_pairs(FAMILIES, POOLS))

The report's head names the week, and so do failures: TEST_WEEK=2026-W48 takes that week's samples again.
"""

import os
import random
from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from itertools import cycle, islice, product
from typing import Any, Final

import pytest


def this_week() -> str:
    year, week, _ = datetime.now(UTC).isocalendar()
    return f"{year}-W{week:02}"


# Set for the processes of pytest-xdist, too, which must agree on Sunday at midnight.
WEEK: Final = os.environ.setdefault("TEST_WEEK", this_week())


def weekly(
    cases: Iterable[Any], num: int, *, always: Collection[Any] = (), week: str = WEEK
) -> list[pytest.ParameterSet]:
    """Return parameters of all cases, a tuple for several; `always` and `num` others are not slow."""
    cases = [*cases]
    others = [case for case in cases if case not in always]
    rng = random.Random(f"{week} {num} {len(others)}")
    chosen = [*always, *rng.sample(others, min(num, len(others)))]
    return [_parameters(case, is_slow=case not in chosen) for case in cases]


def weekly_pairs(*axes: Iterable[Any], num: int = 1, week: str = WEEK) -> list[pytest.ParameterSet]:
    """Return parameters of the product of axes; a part that has each value `num` times or more is not slow."""
    values = [[*axis] for axis in axes]
    sizes = [*map(len, values)]
    rng, longest = random.Random(f"{week} {num} {sizes}"), max(sizes)
    chosen: list[tuple[Any, ...]] = []
    for _ in range(num):
        shuffled = [rng.sample(axis, len(axis)) for axis in values]
        chosen += zip(*(islice(cycle(axis), longest) for axis in shuffled), strict=True)
    return [_parameters(case, is_slow=case not in chosen) for case in product(*values)]


def _parameters(case: Any, *, is_slow: bool) -> pytest.ParameterSet:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow if is_slow else ())
