"""How many recurrent states there is room for, by what is free and what the operator has set."""

from typing import Any

import pytest

from batching.backend.memory.device import MIB
from batching.backend.memory.state_size import StateSize, state_size
from batching.config import EngineConfig
from batching.errors import ModelLoadError

# Of a hybrid of 4 to 9 billion weights.
STATE = 50 * MIB


def size(
    monkeypatch: pytest.MonkeyPatch, free: int, state: int = STATE, **changes: Any
) -> StateSize:
    """Return the size where `free` MiB are free."""
    monkeypatch.setattr("batching.backend.memory.state_size.free_memory", lambda: free * MIB)
    return state_size(EngineConfig(model="m", model_id="m", **changes), state, has_state=True)


def test_a_quarter_of_what_is_free_is_for_running_requests_and_an_eighth_for_checkpoints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = size(monkeypatch, 16_000, max_num_seqs=8)
    assert (made.num_running, made.num_checkpoints) == (8, 16_000 // 8 // 50)
    assert made.num_bytes == (3 * 8 + 40) * STATE
    assert made.note == "recurrent state 50.0 MiB a request, 40 in the prefix cache"


def test_fewer_requests_run_where_no_more_states_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    made = size(monkeypatch, 1800, max_num_seqs=8)
    assert made.num_running == 3
    assert made.note.endswith("; 3 requests at once: no more states fit")
    assert size(monkeypatch, 150, state_cache_mib=0).num_running == 1


def test_a_state_that_does_not_fit_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelLoadError) as caught:
        size(monkeypatch, 149)
    assert str(caught.value) == (
        "the recurrent state of one request needs 150 MiB, and there is room for 149 MiB: "
        "take a smaller model, or a smaller MLX_SERVER_MAX_MODEL_LEN"
    )


def test_the_operator_sets_what_the_prefix_cache_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert size(monkeypatch, 16_000, state_cache_mib=500).num_checkpoints == 10
    assert size(monkeypatch, 16_000, state_cache_mib=0).num_checkpoints == 0
    assert size(monkeypatch, 16_000, enable_prefix_cache=False).num_checkpoints == 0
    with pytest.raises(ModelLoadError) as caught:
        size(monkeypatch, 1000, state_cache_mib=900)
    assert str(caught.value) == (
        "MLX_SERVER_STATE_CACHE_MIB=900 does not fit: 1000 MiB are free, of which 1 running "
        "requests take 150 MiB"
    )


def test_there_are_no_more_checkpoints_than_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert size(monkeypatch, 16_000, state=2048).num_checkpoints == 1024
    assert size(monkeypatch, 16_000, state=2048, num_blocks=64).num_checkpoints == 64
    assert size(monkeypatch, 16_000, state=2048, max_blocks=None).num_checkpoints == 1 << 16


def test_a_model_without_a_state_has_nothing_reserved() -> None:
    config = EngineConfig(model="m", model_id="m", max_num_seqs=5)
    assert state_size(config, 0, has_state=False) == StateSize(5, None)
