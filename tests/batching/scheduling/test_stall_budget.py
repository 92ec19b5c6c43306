from math import inf

import pytest

from batching.scheduling.stall_budget import StallBudget


def test_without_a_measured_prefill_there_is_no_limit() -> None:
    budget = StallBudget(0.1, 32)
    assert budget.max_prefill_tokens(1, 1) is None
    budget.record(0, 4, 0.05)
    assert budget.max_prefill_tokens(1, 1) is None


def test_it_is_the_time_allowed_over_the_time_of_a_token() -> None:
    budget = StallBudget(0.1, 32)
    budget.record(100, 0, 0.2)
    assert budget.max_prefill_tokens(1, 1) == 50


def test_prompts_add_no_more_than_the_decodes_take_alone() -> None:
    budget = StallBudget(0.25, 32)
    for _ in range(30):
        budget.record(0, 8, 0.08)
    for _ in range(30):
        budget.record(80, 8, 0.08 + 80 * 0.001)
    assert budget.max_prefill_tokens(1, 1) == 80


def test_where_prompts_outnumber_the_streams_they_may_add_more() -> None:
    budget = StallBudget(0.25, 32)
    budget.record(0, 1, 0.08)
    budget.record(100, 0, 0.1)
    allowed = [budget.max_prefill_tokens(num, 2) for num in (1, 2, 4, 5, 100)]
    assert allowed == [80, 80, 160, 200, 250]


def test_a_chunk_is_not_shorter_than_it_is_worth() -> None:
    budget = StallBudget(0.25, 32)
    budget.record(0, 1, 0.01)
    budget.record(100, 0, 0.1)
    assert budget.max_prefill_tokens(1, 2) == 32


def test_a_chunk_may_be_shorter_where_a_stream_might_soon_wait_for_it() -> None:
    budget = StallBudget(0.25, 32)
    assert budget.max_interruptible_tokens() is None
    budget.record(0, 1, 0.03)
    budget.record(100, 0, 0.1)
    assert budget.max_interruptible_tokens() == 30
    for _ in range(30):
        budget.record(0, 1, 0.01)
    assert budget.max_interruptible_tokens() == StallBudget._MIN_TOKENS


def test_decodes_faster_than_half_a_prompt_token_still_bound_a_chunk() -> None:
    budget = StallBudget(0.25, 32)
    budget.record(0, 1, 0.0001)
    budget.record(100, 0, 0.1)
    assert budget.max_prefill_tokens(1, 1) == 32
    assert budget.max_interruptible_tokens() == StallBudget._MIN_TOKENS


def test_a_step_without_streams_takes_as_long_as_a_request_may_wait_for_it() -> None:
    budget = StallBudget(0.1, 32, max_alone=0.5)
    assert budget.max_prefill_tokens(1, 0) is None
    budget.record(100, 0, 0.2)
    assert budget.max_prefill_tokens(1, 0) == 250
    for _ in range(30):
        budget.record(1, 0, 1.0)
    assert budget.max_prefill_tokens(9, 0) == StallBudget._MIN_TOKENS


def test_a_step_without_streams_may_have_no_limit() -> None:
    budget = StallBudget(0.1, 32)
    budget.record(100, 0, 0.2)
    assert budget.max_prefill_tokens(1, 0) is None


def test_it_follows_a_machine_that_slows_down_but_not_one_slow_step() -> None:
    budget = StallBudget(0.1, 32)
    for _ in range(20):
        budget.record(100, 0, 0.1)
    budget.record(100, 0, 0.3)
    after_one = budget.max_prefill_tokens(1, 1)
    assert after_one is not None
    assert 60 < after_one < 100
    for _ in range(50):
        budget.record(100, 0, 1.0)
    assert budget.max_prefill_tokens(1, 1) == StallBudget._MIN_TOKENS


def test_a_few_tokens_on_a_cached_prefix_say_little() -> None:
    """Such a step takes as long as any and reads next to nothing."""
    budget = StallBudget(0.25, 32)
    budget.record(256, 0, 0.5)
    budget.record(1, 1, 0.05)
    assert (budget.max_prefill_tokens(1, 1) or 0) > 100


def test_fewer_streams_than_before_do_not_lift_the_limit() -> None:
    budget = StallBudget(0.25, 32)
    for _ in range(30):
        budget.record(0, 16, 0.1)
    for _ in range(10):
        budget.record(16, 1, 0.045 + 16 * 0.003)
    assert (budget.max_prefill_tokens(1, 1) or 1e9) <= 0.25 / 0.003


def test_images_may_take_the_time_allowed_beside_streams_and_more_alone() -> None:
    budget = StallBudget(0.2, 32, max_alone=0.5)
    assert (
        budget.max_image_bytes(has_streams=True) == 0.0 == budget.max_image_bytes(has_streams=False)
    )
    budget.record_images(1000.0, 0, 0, 0.1)
    assert budget.max_image_bytes(has_streams=True) == pytest.approx(2000)
    assert budget.max_image_bytes(has_streams=False) == pytest.approx(5000)
    assert StallBudget(0.2, 32).max_image_bytes(has_streams=False) == inf


def test_what_decodes_and_prompts_take_beside_an_image_is_not_its_own() -> None:
    budget = StallBudget(0.2, 32)
    budget.record(0, 4, 0.1)
    budget.record(100, 0, 0.2)
    budget.record_images(1000.0, 50, 4, 0.1 + 0.1 + 0.4)
    assert budget.max_image_bytes(has_streams=True) == pytest.approx(500)
    # Nor is the time of images theirs.
    assert budget.max_prefill_tokens(1, 0, has_other_streams=True) == 50


def test_an_image_that_adds_too_little_to_be_measured_takes_a_quarter_of_its_step() -> None:
    budget = StallBudget(0.2, 32)
    budget.record(0, 4, 0.1)
    budget.record_images(1000.0, 0, 1, 0.08)
    assert budget.max_image_bytes(has_streams=True) == pytest.approx(10_000)
