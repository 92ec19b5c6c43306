"""What a model needs in all: weights, keys and values, states, and the smallest pool."""

from dataclasses import replace
from typing import Any

import pytest

from batching.config import EngineConfig
from batching.fit.block_bytes import BlockBytes, least_blocks
from batching.fit.estimate import MemoryEstimate, estimate
from batching.fit.weights import Compute
from batching.model_files.description import ModelDescription
from batching.model_files.tensor import StoredTensor
from tests.support.rows import rows

MIB = 1 << 20
CONFIG = EngineConfig(model="m", model_id="m")
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
}
WEIGHTS = (StoredTensor("a.weight", "BF16", (1024, 1024), 2 * MIB),)


def of(
    config: dict[str, Any] = LLAMA, compute: Compute = Compute.STORED, **changes: Any
) -> MemoryEstimate:
    model = ModelDescription(None, config, WEIGHTS, 0)
    return estimate(model, replace(CONFIG, **changes), compute)


def test_a_model_needs_weights_and_at_least_a_pool_for_one_request() -> None:
    needs = of()
    assert (needs.weights, needs.overhead) == (2 * MIB, 256 * MIB + MIB // 2)
    # Keys and values of 128 numbers in 4 layers, in 16 bits.
    assert needs.kv_bytes_per_token == 2 * 128 * 4 * 2
    assert (needs.least_blocks, needs.wanted_blocks) == (32, 1024)
    assert needs.least_pool == 1024 * 2048
    assert needs.wanted_pool == 32768 * 2048
    assert needs.least == needs.weights + needs.overhead + 1024 * 2048
    assert needs.wanted - needs.least == 31744 * 2048
    assert needs.is_complete


def test_a_pool_takes_half_of_what_the_weights_leave() -> None:
    needs = of()
    block = 32 * 2048
    assert needs.num_blocks_within(1 << 40) == 1024
    assert needs.num_blocks_within(needs.weights + needs.overhead + 200 * block) == 100
    assert needs.num_blocks_within(0) == 32


def test_a_pool_that_is_set_is_needed_whole() -> None:
    needs = of(num_blocks=100)
    assert needs.least_blocks == needs.wanted_blocks == 100
    assert of(max_blocks=None).wanted_blocks == 32
    assert of(max_blocks=8).least_blocks == 8


@rows(
    ("compute", "changes", "kv_bytes"),
    [
        (Compute.STORED, {}, 2),
        (Compute.STORED, {"dtype": "float32"}, 4),
        (Compute.KERNELS, {}, 2),
        (Compute.KERNELS, {"cpu_precision": "exact"}, 4),
        (Compute.FLOATS, {}, 4),
        (Compute.FLOATS, {"dtype": "bfloat16"}, 2),
        (Compute.FLOATS, {"kv_cache_dtype": "bfloat16"}, 2),
    ],
)
def test_keys_and_values_are_of_the_type_that_is_computed(
    compute: Compute, changes: dict[str, Any], kv_bytes: int
) -> None:
    assert of(LLAMA, compute, **changes).kv_bytes_per_token == 1024 * kv_bytes


def test_what_is_gathered_is_not_rounded_by_the_kernels() -> None:
    assert of({**LLAMA, "model_type": "stablelm"}, Compute.KERNELS).kv_bytes_per_token == 4096


def test_8_bits_have_scales() -> None:
    assert of(kv_cache_dtype="int8").kv_bytes_per_token == 4 * 4 * (64 + 8)


def test_windows_have_blocks_of_their_own() -> None:
    windows = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}
    needs = of({**LLAMA, **windows})
    assert needs.block is not None
    assert needs.block.windowed == needs.block.total // 2
    # Windows of half of the requests, and the blocks of a chunk.
    assert needs.block.least_windowed == 4 * 3 + 8
    assert needs.wanted_pool is not None
    assert needs.wanted_pool < 32768 * 2048


def test_a_recurrent_model_needs_states_and_no_pool() -> None:
    mamba = {"intermediate_size": 256, "conv_kernel": 4, "state_size": 16}
    needs = of({**LLAMA, "model_type": "mamba", **mamba})
    assert needs.states == 3 * 4 * 4 * 4864
    assert (needs.kv_bytes_per_token, needs.least_pool) == (0, 0)
    assert needs.num_blocks_within(0) == 1024
    assert needs.least == needs.weights + needs.overhead + 3 * 4 * 4 * 4864


def test_what_a_config_does_not_tell_is_left_out() -> None:
    needs = of({"model_type": "strange"})
    assert not needs.is_complete
    assert needs.least == needs.wanted == 2 * MIB + needs.overhead
    assert needs.num_blocks_within(0) == 1024
    # Without layers all weights may be in one.
    assert needs.overhead == 256 * MIB + 2 * MIB


def test_a_short_context_needs_fewer_blocks() -> None:
    assert (least_blocks(64, 32), least_blocks(8192, 32)) == (2, 32)


@pytest.mark.parametrize(("num_blocks", "window_blocks", "roomy"), [(10, 0, 0), (1000, 75, 312)])
def test_blocks_of_windows(num_blocks: int, window_blocks: int, roomy: int) -> None:
    block = BlockBytes(100, 50, 20)
    assert block.num_window_blocks(num_blocks) == window_blocks
    assert block.roomy_window_blocks(num_blocks) == roomy
    assert block.of(num_blocks) == 50 * num_blocks + 50 * (window_blocks or num_blocks)
    assert block.of(num_blocks, 5) == 50 * num_blocks + 250
    assert block.num_within(block.of(num_blocks)) == num_blocks
    assert BlockBytes(100).roomy_window_blocks(num_blocks) == 0


def test_slots_of_adapters_are_part_of_what_is_needed() -> None:
    """A number in float32 for each rank, and each input and output of the linear layers."""
    tensors = (
        StoredTensor("model.layers.0.self_attn.q_proj.weight", "BF16", (192, 128), 49152),
        StoredTensor("model.layers.0.mlp.up_proj.weight", "U32", (256, 16), 16384),
        StoredTensor("model.layers.0.mlp.up_proj.scales", "BF16", (256, 2), 1024),
        StoredTensor("model.layers.0.input_layernorm.weight", "BF16", (128,), 256),
        StoredTensor("model.embed_tokens.weight", "BF16", (1000, 128), 256000),
    )
    quantization = {"group_size": 64, "bits": 4}
    model = ModelDescription(None, {**LLAMA, "quantization": quantization}, tensors, 0)
    without = estimate(model, CONFIG, Compute.STORED)
    needs = estimate(model, replace(CONFIG, max_adapters=3, max_adapter_rank=8), Compute.STORED)
    assert needs.adapters == 3 * 8 * 4 * (192 + 128 + 256 + 128)
    assert needs.least - without.least == needs.adapters
    assert without.adapters == 0
