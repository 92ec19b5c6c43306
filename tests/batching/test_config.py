from dataclasses import FrozenInstanceError
from math import inf
from typing import Any

import pytest

from batching.config import EngineConfig, SchedulerConfig


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": 0}, "num_blocks must be at least 1, not 0"),
        ({"prefill_chunk": -1}, "prefill_chunk must be at least 1, not -1"),
        (
            {"max_num_seqs": 9, "max_num_batched_tokens": 8},
            r"max_num_batched_tokens \(8\) must be at",
        ),
        ({"aging_rate": 0.0}, "aging_rate must be above 0"),
        ({"aging_rate": float("nan")}, "aging_rate must be above 0"),
        ({"max_draft_tokens": -1}, "max_draft_tokens must not be below 0"),
    ],
)
def test_a_limit_out_of_range_is_rejected_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**changes)
    if "num_blocks" not in changes:
        with pytest.raises(ValueError, match=message):
            EngineConfig(model="m", model_id="m", **changes)


def test_the_number_of_checkpoints_may_be_0_or_unknown_and_not_below() -> None:
    assert SchedulerConfig(num_checkpoints=0) != SchedulerConfig(num_checkpoints=None)
    with pytest.raises(ValueError, match="num_checkpoints must not be below 0"):
        SchedulerConfig(num_checkpoints=-1)


@pytest.mark.parametrize(
    "changes",
    [
        {"memory_fraction": 1.0},
        {"memory_fraction": 0.0},
        {"max_stall_ms": 0.0},
        {"max_urgent_wait_ms": 0.0},
        {"step_timeout": 0.0},
        {"num_blocks": 0},
        {"max_model_len": 0},
        {"cpu_threads": 0},
        {"state_cache_mib": -1},
        {"weights_cache_gib": -1},
        {"mlx_cache_mib": -1},
        {"wired_limit_mib": -1},
    ],
)
def test_an_engine_limit_out_of_range_is_rejected(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        EngineConfig(model="m", model_id="m", **changes)


def test_without_an_urgent_wait_requests_wait_for_ever() -> None:
    assert SchedulerConfig(max_urgent_wait_ms=None).max_urgent_wait == inf
    assert SchedulerConfig(max_urgent_wait_ms=250.0).max_urgent_wait == 0.25


def test_the_context_is_the_smallest_of_model_setting_and_pool() -> None:
    config = EngineConfig(model="m", model_id="m", block_size=4, max_model_len=100)
    assert config.scheduler_config(1000, model_context=50).max_request_tokens == 50
    assert config.scheduler_config(1000, model_context=500).max_request_tokens == 100
    assert config.scheduler_config(10, model_context=500).max_request_tokens == 40


@pytest.mark.parametrize(
    ("declared", "setting", "context"),
    [(50, None, 50), (50, 100, 50), (None, 100, 100), (None, 8192, 8192), (None, None, 4096)],
)
def test_where_a_model_declares_no_context_the_setting_is_its_context(
    declared: int | None, setting: int | None, context: int
) -> None:
    config = EngineConfig(model="m", model_id="m", max_model_len=setting)
    assert config.model_context(declared) == context


def test_a_config_is_never_completed_later() -> None:
    config = EngineConfig(model="m", model_id="m")
    with pytest.raises(FrozenInstanceError):
        config.model = "other"  # type: ignore[misc]
