import pytest

from batching.stall_budget import StallBudget


def test_nothing_is_known_before_a_prompt_was_read() -> None:
    budget = StallBudget(0.1)
    assert budget.max_prefill_tokens is None
    budget.record(0, 4, 0.05)
    assert budget.max_prefill_tokens is None


def test_what_the_decodes_take_is_not_the_prompts_cost() -> None:
    budget = StallBudget(0.1)
    budget.record(0, 4, 0.05)
    budget.record(100, 4, 0.15)
    assert budget.max_prefill_tokens == pytest.approx(100, abs=1)


def test_it_follows_a_machine_that_slows_down_but_not_one_slow_step() -> None:
    budget = StallBudget(0.1)
    budget.record(100, 0, 0.1)
    budget.record(100, 0, 1.0)
    after_one = budget.max_prefill_tokens
    assert after_one is not None
    assert 20 < after_one < 100
    for _ in range(50):
        budget.record(100, 0, 1.0)
    assert budget.max_prefill_tokens == StallBudget._MIN_TOKENS


def test_a_prompt_that_cost_nothing_measurable_is_not_bounded() -> None:
    budget = StallBudget(0.1)
    budget.record(0, 1, 0.2)
    budget.record(8, 1, 0.1)
    assert budget.max_prefill_tokens is None
