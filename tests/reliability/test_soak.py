"""`python -m scripts.soak` in small: its load ends well, and what it concludes from numbers is right."""

import asyncio
from itertools import count
from math import sqrt

import pytest

from scripts.server_process import Server, num_open_files
from scripts.soak import checks, gauges, mixed, overload
from scripts.soak.__main__ import main
from scripts.soak.client import Outcome
from scripts.soak.fairness import Race, violations
from tests.support.live import check_all_is_well
from tests.support.rows import rows

pytestmark = pytest.mark.timeout(240)


@pytest.mark.slow
def test_a_mixed_load_ends_well_in_every_part(server: Server) -> None:
    address = server.address()
    num_files = num_open_files(server.pid)
    before = asyncio.run(mixed.reference_texts(address, 2))
    numbers = count(1)

    def is_over() -> bool:
        return next(numbers) > len(mixed.ROUND)

    tally = asyncio.run(mixed.crowd(address, num_clients=8, is_over=is_over))
    assert tally.faults == []
    assert tally.num_requests == len(mixed.ROUND)
    check_all_is_well(server, num_files)
    assert asyncio.run(mixed.reference_texts(address, 2)) == before


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_all_bounds_are_kept() -> None:
    assert main([]) == 0


def test_a_line_through_samples_has_a_slope_and_an_error() -> None:
    assert checks.trend([0, 1, 2, 3], [5, 7, 9, 11]) == pytest.approx((2, 0))
    assert checks.trend([0, 1, 2, 3], [0, 1, 1, 0]) == pytest.approx((0, sqrt(1 / 2 / 5)))
    assert checks.trend([0, 1, 2], [0, 1, 2]).times(60) == pytest.approx((60, 0))


def test_gauges_are_summed_over_their_labels() -> None:
    text = '# HELP a:b x\n# TYPE a:b gauge\na:b{x="1"} 2.0\na:b{x="2 } y"} 1e1\nc 0\n'
    assert gauges.parse(text) == {"a:b": 12.0, "c": 0.0}


def rejection(retry_after: str | None, status: int = 503, code: str | None = "full") -> Outcome:
    headers = {} if retry_after is None else {"retry-after": retry_after}
    return Outcome(0.0, status=status, headers=headers, error={"code": code}, is_done=True)


@rows(
    ("outcome", "is_fault"),
    [
        (rejection("1"), False),
        (rejection("120", 429), False),
        (rejection("121"), True),
        (rejection("0"), True),
        (rejection("1.5"), True),
        (rejection(None), True),
        (rejection("1", code=None), True),
        (rejection("1", 500), True),
        (Outcome(0.0, status=200, is_done=True, finish_reasons={0: "stop"}), False),
        (Outcome(0.0, status=200, finish_reasons={0: "stop"}), True),
        (Outcome(0.0, status=200, is_done=True), True),
        (Outcome(0.0, broken="no head"), True),
    ],
)
def test_an_answer_or_a_rejection_in_good_form_is_no_fault(
    outcome: Outcome, is_fault: bool
) -> None:
    assert bool(overload.faults([outcome])) is is_fault


def test_who_came_too_late_to_overtake_is_found() -> None:
    low = Outcome(0.0, taken=0.1, first_token=9.0)
    urgent = [Outcome(sent, first_token=first) for sent, first in ((1, 5), (2.0, 8), (2.2, 8.5))]
    assert violations(Race(urgent, [low]), aging_rate=1.0) == [
        "sent 2.100 s after it, began before; the bound is 2 s"
    ]
    # First tokens of one step come together, in any order.
    assert violations(Race([Outcome(2.2, first_token=8.99)], [low]), aging_rate=1.0) == []


def test_a_missed_bound_is_marked() -> None:
    found = [
        checks.at_most("wait", 3.0, 2.0, "s"),
        checks.equal("status", 0, 0),
        checks.none_of("faults", ["a"]),
    ]
    assert [check.is_met for check in found] == [False, True, False]
    assert checks.lines(found) == [
        "  wait    3 s  [at most 2 s]  MISSED",
        "  status  0  [0]",
        "  faults  1: a  [0]  MISSED",
    ]
