from hypothesis import given, strategies as st

from batching.scheduling.prefill_budget import share_prefill_budget

PENDING = st.lists(st.integers(1, 40), max_size=6)


def test_without_a_prompt_nothing_is_shared() -> None:
    assert share_prefill_budget([], 8, 8) == []


def test_the_first_prompt_gets_half_and_the_shortest_ones_the_rest() -> None:
    assert share_prefill_budget([20, 9, 3], 10, 20) == [5, 2, 3]


def test_the_one_due_first_gets_a_quarter_behind_one_of_a_higher_class() -> None:
    assert share_prefill_budget([20, 9, 30], 10, 20, due_first=2) == [5, 2, 3]


@given(PENDING, st.integers(0, 60), st.integers(1, 30), st.data())
def test_the_budget_is_used_up_unless_every_prompt_has_all_it_may_take(
    num_pending: list[int], budget: int, max_chunk: int, data: st.DataObject
) -> None:
    due_first = data.draw(st.integers(0, max(0, len(num_pending) - 1)))
    granted = share_prefill_budget(num_pending, budget, max_chunk, due_first)
    most = [min(num, max_chunk) for num in num_pending]
    assert all(0 <= num <= limit for num, limit in zip(granted, most, strict=True))
    assert sum(granted) == min(budget, sum(most))
    assert not granted or granted[0] >= min(most[0], (budget + 1) // 2)
    assert not granted or granted[due_first] >= min(most[due_first], budget // 4)
