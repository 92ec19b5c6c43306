"""How many blocks the pool has, by what is free and what the operator has set."""

from typing import Any, Final

import pytest

from batching.backend.memory import device as memory
from batching.backend.memory.device import MIB
from batching.backend.memory.pool_size import BlockBytes, PoolSize, least_window_blocks, pool_size
from batching.config import BLOCK_SIZE, EngineConfig, SchedulerConfig
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


# Layers of a model, those of them that see a window, and this; they are alike otherwise.
GEMMA_3_1B: Final = (26, 22, 512)
GEMMA_3_4B: Final = (34, 29, 1024)
GPT_OSS_20B: Final = (24, 12, 128)
MISTRAL_7B_V01: Final = (32, 32, 4096)


def block_bytes(num_layers: int, num_windowed: int, window: int, num_seqs: int = 8) -> BlockBytes:
    """Return what blocks take whose part in one layer is a byte."""
    limits = SchedulerConfig(max_num_seqs=num_seqs)
    return BlockBytes(num_layers, num_windowed, least_window_blocks(limits, window))


@pytest.mark.parametrize(
    ("model", "num_tokens", "percentage", "floor"),
    [
        (GEMMA_3_1B, 32 * 1024, 21.7, 15.4),
        (GEMMA_3_1B, 128 * 1024, 21.7, 15.4),
        (GEMMA_3_4B, 32 * 1024, 26.4, 14.7),
        (GEMMA_3_4B, 128 * 1024, 21.1, 14.7),
        (GPT_OSS_20B, 32 * 1024, 53.7, 50.0),
        (GPT_OSS_20B, 128 * 1024, 53.7, 50.0),
        (MISTRAL_7B_V01, 32 * 1024, 51.2, 0.0),
        (MISTRAL_7B_V01, 128 * 1024, 12.8, 0.0),
    ],
)
def test_a_pool_takes_little_more_than_its_layers_without_a_window(
    model: tuple[int, int, int], num_tokens: int, percentage: float, floor: float
) -> None:
    """`percentage` of what it would take if nothing left a window; `floor` if windows took nothing."""
    num_layers, num_windowed, _ = model
    num_blocks = num_tokens // BLOCK_SIZE
    taken = block_bytes(*model).of(num_blocks) / (num_layers * num_blocks)
    assert round(100 * taken, 1) == percentage
    assert round(100 * (1 - num_windowed / num_layers), 1) == floor


GEMMA: Final = block_bytes(*GEMMA_3_1B)


def test_layers_with_a_window_have_a_share_of_the_number_of_the_others() -> None:
    # At least 4 requests with a window of 16 blocks and one for the next token, and a chunk of 256.
    assert GEMMA.least_windowed == 4 * (16 + 1) + 256 // 32
    assert block_bytes(*GEMMA_3_1B, num_seqs=1).least_windowed == 17 + 8
    assert [GEMMA.num_window_blocks(n) for n in (1024, 4096)] == [76, 307]
    assert GEMMA.of(4096) == 4 * 4096 + 22 * 307


def test_they_share_the_blocks_of_the_others_where_these_are_few() -> None:
    least = GEMMA.least_windowed
    assert [GEMMA.num_window_blocks(n) for n in (1, least, least + 1)] == [0, 0, least]
    assert GEMMA.of(least) == 26 * least
    sizes = [GEMMA.of(n) for n in range(2000)]
    assert sizes == sorted(sizes)
    assert BlockBytes(26).num_window_blocks(1024) == 0


def test_they_have_more_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    lean, roomy = GEMMA.num_window_blocks(1024), GEMMA.roomy_window_blocks(1024)
    assert (lean, roomy) == (76, 1024 * 5 // 16)
    # As many as all requests need, and no more than there are.
    assert GEMMA.roomy_window_blocks(200) == 2 * 76
    assert GEMMA.roomy_window_blocks(100) == 76
    assert GEMMA.roomy_window_blocks(76) == BlockBytes(26).roomy_window_blocks(1024) == 0
    block = BlockBytes(26 * LAYER, 22 * LAYER, GEMMA.least_windowed)
    room = 2 * block.of(1024, roomy) // MIB + 1
    for options in ({}, {"num_blocks": 1024}):
        for free, expected in ((room, roomy), (room - 2, lean)):
            size = size_and_note(monkeypatch, free, block=block, **options)
            assert (size.num_blocks, size.num_window_blocks) == (1024, expected)


# One head of 256 numbers of 16 bits.
LAYER: Final = BLOCK_SIZE * 2 * 256 * 2


@pytest.mark.parametrize(
    "block", [BlockBytes(26 * LAYER, 22 * LAYER, 76), BlockBytes(22 * LAYER, 22 * LAYER, 76)]
)
def test_a_pool_with_windows_takes_no_more_than_fits(
    monkeypatch: pytest.MonkeyPatch, block: BlockBytes
) -> None:
    for free in (100, 200, 400):
        size = size_and_note(monkeypatch, free, block=block).num_blocks
        assert size == 1024 or block.of(size) <= free * MIB // 2 < block.of(size + 1)
    with pytest.raises(PoolTooLarge, match="which hold"):
        size_and_note(monkeypatch, 50, block=block, num_blocks=4096)


def test_a_pool_takes_no_more_than_other_models_leave_to_it_but_the_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("batching.backend.memory.pool_size.free_memory", lambda: 20_000 * MIB)
    monkeypatch.setattr("batching.backend.memory.pool_size.bytes_within", lambda _: 0)
    block = BlockBytes(BYTES_PER_BLOCK)

    def granted(num_mib: int, **changes: Any) -> int:
        config = EngineConfig(model="m", model_id="m", **changes)
        return pool_size(config, block, CONTEXT, granted=num_mib * MIB).num_blocks

    assert granted(1400) == 100
    assert granted(-5) == 32
    # With `auto` it takes all of that.
    assert granted(1400, max_blocks=None) == 200
    assert granted(70, num_blocks=64) == 64
