"""What the samples of a week hold: no case is lost, and each value of an axis is there."""

from collections.abc import Sequence

import pytest

from tests.support.weekly import is_in_turn, weekly, weekly_pairs

WEEKS = [f"2026-W{week:02}" for week in range(1, 53)]
CASES = [*range(40)]


def sample(parameters: Sequence[pytest.ParameterSet]) -> list[Sequence[object]]:
    return [p.values for p in parameters if not p.marks]


def test_all_cases_are_there_and_the_sample_is_as_large_as_asked() -> None:
    made = weekly(CASES, 5, always=[7, 9])
    assert [p.values for p in made] == [(case,) for case in CASES]
    assert len(sample(made)) == 7
    assert {(7,), (9,)} <= {*sample(made)}
    assert all(mark.name == "slow" for p in made for mark in p.marks)


def test_a_week_is_repeated_and_a_year_has_all_cases() -> None:
    assert sample(weekly(CASES, 5, week="2026-W01")) == sample(weekly(CASES, 5, week="2026-W01"))
    assert {case for week in WEEKS for case in sample(weekly(CASES, 5, week=week))} == {
        (case,) for case in CASES
    }


def test_each_test_has_its_turn_and_those_of_a_week_are_a_share_of_all() -> None:
    names = [f"tests/test_x.py::test_{i}" for i in range(60)]
    for name in names:
        assert sum(is_in_turn(name, 3, week) for week in WEEKS[:3]) == 1
    assert 10 < sum(is_in_turn(name, 3, WEEKS[0]) for name in names) < 30
    assert all(is_in_turn(name, 1) for name in names)


@pytest.mark.parametrize("week", WEEKS[:4])
def test_each_value_of_each_axis_is_in_a_sample_of_pairs(week: str) -> None:
    axes = ["abcdef", [1, 2, 3, 4], [True, False]]
    made = weekly_pairs(*axes, week=week)
    assert len(made) == 6 * 4 * 2
    assert len(sample(made)) == 6
    for axis, values in zip(axes, zip(*sample(made), strict=True), strict=True):
        assert {*values} == {*axis}
    fewer = sample(weekly_pairs(*axes, size=4, week=week))
    assert len(fewer) == 4
    assert {number for _, number, _ in fewer} == {1, 2, 3, 4}
