"""How many blocks the pool has, by what is free and what the operator has set."""

from typing import Any

import pytest

from batching.backend.memory import device as memory
from batching.backend.memory.device import MIB
from batching.backend.memory.pool_size import BlockBytes, PoolSize, pool_size
from batching.config import EngineConfig, SchedulerConfig
from batching.errors import ModelLoadError, PoolTooLarge

# 32 tokens of a model of 1.7 billion weights.
BYTES_PER_BLOCK = 7 * MIB
CONTEXT = 8192


def size(monkeypatch: pytest.MonkeyPatch, free: int, context: int = CONTEXT, **changes: Any) -> int:
    return size_and_note(monkeypatch, free, context, **changes).num_blocks


def size_and_note(
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    context: int = CONTEXT,
    block: BlockBytes | None = None,
    **changes: Any,
) -> PoolSize:
    """Return the size where `free` MiB are free."""
    monkeypatch.setattr("batching.backend.memory.pool_size.free_memory", lambda: free * MIB)
    config = EngineConfig(model="m", model_id="m", **changes)
    return pool_size(config, block or BlockBytes(BYTES_PER_BLOCK), context)


def test_the_ceiling_is_reached_where_half_of_what_is_free_holds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert size(monkeypatch, 2 * 7 * 1024) == 1024
    assert size(monkeypatch, 2 * 7 * 1024 - 1) == 1023
    assert size(monkeypatch, 2 * 7 * 100) == 100


def test_fewer_blocks_than_the_ceiling_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    assert size_and_note(monkeypatch, 8000).note == (
        "; not 1024, which are 7168 MiB: 8000 MiB are free, and the pool takes half of them"
    )
    assert size_and_note(monkeypatch, 80_000).note == ""


def test_one_request_of_1024_tokens_has_room_beyond_the_half(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert size(monkeypatch, 7 * 32) == 32
    with pytest.raises(ModelLoadError) as caught:
        size(monkeypatch, 7 * 32 - 1)
    assert str(caught.value) == (
        "the least KV pool, 32 blocks, needs 224 MiB, and there is room for 223 MiB: "
        "take a smaller model, or a KV cache of 16 bits"
    )


def test_a_model_of_a_short_context_needs_no_more_than_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert size(monkeypatch, 7 * 4, context=128) == 4


def test_a_number_that_is_set_is_taken_if_it_fits_and_else_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert size(monkeypatch, 7 * 2000, num_blocks=2000) == 2000
    assert size(monkeypatch, 7, num_blocks=1) == 1
    with pytest.raises(PoolTooLarge) as caught:
        size(monkeypatch, 7 * 2000 - 1, num_blocks=2000)
    assert str(caught.value) == (
        "a KV pool of 2000 blocks needs 14000 MiB; 13999 MiB are free, which hold 1999 blocks"
    )


def test_without_a_ceiling_a_share_of_the_devices_memory_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "memory_in_use", lambda: 1000 * MIB)
    monkeypatch.setattr(memory, "device_memory", lambda: 10_000 * MIB)
    options: dict[str, Any] = {"max_blocks": None, "memory_fraction": 0.25}
    assert size(monkeypatch, 5000, **options) == 1500 // 7
    with pytest.raises(ModelLoadError, match="there is room for 0 MiB: take a larger share of"):
        size(monkeypatch, 5000, max_blocks=None, memory_fraction=0.1)


# Gemma 3 1B: 22 of 26 layers see 512 tokens; each has one head of 256 numbers of 16 bits.
LAYER = 32 * 2 * 256 * 2
IN_USE = SchedulerConfig().max_window_blocks_in_use(512)
GEMMA = BlockBytes(26 * LAYER, 22 * LAYER, IN_USE)


def test_layers_with_a_window_have_as_many_blocks_as_they_need() -> None:
    # 8 requests with a window of 16 blocks, one for the next token and one for drafts, and a step.
    assert IN_USE == 8 * (16 + 1 + 1) + 16
    assert [GEMMA.num_window_blocks(n) for n in (1024, 4096)] == [2 * IN_USE, IN_USE + 512]
    assert GEMMA.of(1024) == (4 * 1024 + 22 * 2 * IN_USE) * LAYER
    assert GEMMA.of(1024) < 0.42 * 26 * 1024 * LAYER
    assert GEMMA.of(4096) < 0.3 * 26 * 4096 * LAYER


def test_they_share_the_blocks_of_the_others_where_these_are_few() -> None:
    assert [GEMMA.num_window_blocks(n) for n in (1, 2 * IN_USE, 2 * IN_USE + 1)] == [
        0,
        0,
        2 * IN_USE,
    ]
    assert GEMMA.of(2 * IN_USE) == 26 * 2 * IN_USE * LAYER
    sizes = [GEMMA.of(n) for n in range(2000)]
    assert sizes == sorted(sizes)
    assert BlockBytes(LAYER).num_window_blocks(1024) == 0


@pytest.mark.parametrize("block", [GEMMA, BlockBytes(22 * LAYER, 22 * LAYER, IN_USE)])
def test_a_pool_with_windows_takes_no_more_than_fits(
    monkeypatch: pytest.MonkeyPatch, block: BlockBytes
) -> None:
    for free in (100, 200, 400):
        size = size_and_note(monkeypatch, free, block=block).num_blocks
        assert size == 1024 or block.of(size) <= free * MIB // 2 < block.of(size + 1)
    with pytest.raises(PoolTooLarge, match="which hold"):
        size_and_note(monkeypatch, 50, block=block, num_blocks=4096)
