"""GGUF files: the same logits as the model they were written from, and clear errors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from batching.backend.loader import load_model
from batching.errors import ModelLoadError
from batching.model_files.gguf_header import read_header
from tests.support.arrays import parameters
from tests.support.gguf_models import (
    Array,
    Metadata,
    Tensors,
    blocks,
    load_gguf,
    metadata_of,
    random_model,
    tensors_of,
)
from tests.support.gguf_writer import F64, Q4_0, Q4_1, Q4_K, Q8_0, RawTensor, write_gguf

TOKENS = mx.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3] * 4])


def assert_same_logits(path: Path, model: nn.Module) -> None:
    loaded, _ = load_gguf(read_header(path), mx.float32)
    assert mx.allclose(loaded(TOKENS), model(TOKENS), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"head_dim": 64}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 64}),
    ],
)
def test_a_file_computes_what_its_model_computes(
    tmp_path: Path, family: str, changes: dict[str, Any], is_tied: bool
) -> None:
    model, config = random_model(family, tie_word_embeddings=is_tied, **changes)
    path = write_gguf(tmp_path / "m.gguf", metadata_of(config), tensors_of(model, config))
    assert_same_logits(path, model)


def test_a_llama_with_biases_on_q_k_and_v_only(tmp_path: Path) -> None:
    model, config = random_model("llama", attention_bias=True)
    for layer in model.layers:
        layer.self_attn.o_proj.bias = mx.zeros(128)
    tensors = tensors_of(model, config)
    without = {name: value for name, value in tensors.items() if "attn_output.bias" not in name}
    assert len(without) == len(tensors) - 2
    assert_same_logits(write_gguf(tmp_path / "m.gguf", metadata_of(config), without), model)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("scaling", "metadata"),
    [
        ({"type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}),
        ({"type": "linear", "factor": 4.0}, {"factor": 4.0}),
        (None, {"type": "linear"}),
        (None, {"type": "none", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            {"type": "yarn", "factor": 4.0, "original_context_length": 32},
        ),
    ],
)
def test_rope_scaling_by_parameters(
    tmp_path: Path, family: str, scaling: dict[str, Any] | None, metadata: Metadata
) -> None:
    model, config = random_model(family, rope_scaling=scaling)
    entries = {f"{family}.rope.scaling.{key}": value for key, value in metadata.items()}
    tensors = tensors_of(model, config)
    assert_same_logits(
        write_gguf(tmp_path / "m.gguf", metadata_of(config) | entries, tensors), model
    )


def test_linear_rope_scaling_of_files_of_2023(tmp_path: Path) -> None:
    model, config = random_model("llama", rope_scaling={"type": "linear", "factor": 4.0})
    metadata = metadata_of(config) | {"llama.rope.scale_linear": 4.0}
    assert_same_logits(write_gguf(tmp_path / "m.gguf", metadata, tensors_of(model, config)), model)


def test_llama_3s_rope_scaling_by_factors(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    model, config = random_model("llama", rope_scaling=scaling)
    plain = 5000.0 ** (np.arange(0, 32, 2, dtype=np.float32) / 32)
    factors = np.array(model.layers[0].self_attn.rope._freqs) / plain
    assert factors[0] == 1.0
    assert factors[-1] == pytest.approx(8.0)
    tensors = tensors_of(model, config) | {"rope_freqs.weight": factors.astype(np.float32)}
    assert_same_logits(write_gguf(tmp_path / "m.gguf", metadata_of(config), tensors), model)


@pytest.fixture
def quantized(tmp_path: Path) -> tuple[Path, dict[str, Array]]:
    """Return a qwen2 file with a tensor of each quantized type, and what they stand for."""
    model, config = random_model("qwen2", hidden_size=256)
    tensors = tensors_of(model, config)
    expected = {}
    kinds = {"token_embd": Q8_0, "blk.0.attn_q": Q4_0, "blk.0.attn_k": Q4_1, "blk.1.ffn_up": Q4_K}
    for seed, (name, kind) in enumerate(kinds.items()):
        dense = tensors[f"{name}.weight"]
        assert not isinstance(dense, RawTensor)
        rows, columns = dense.shape
        tensors[f"{name}.weight"], expected[name] = blocks(kind, (rows, columns), seed)
    return write_gguf(tmp_path / "q.gguf", metadata_of(config), tensors), expected


def test_with_a_dtype_every_weight_is_dense_and_right(
    quantized: tuple[Path, dict[str, Array]],
) -> None:
    path, expected = quantized
    model, _ = load_gguf(read_header(path), mx.float32)
    assert {array.dtype for array in parameters(model).values()} == {mx.float32}
    for name, module in modules(model):
        # Not equal: float16 rounds the product, then the sum.
        np.testing.assert_allclose(np.array(module.weight), expected[name], rtol=2e-3, atol=0.02)


def test_without_a_dtype_quantized_weights_stay(
    quantized: tuple[Path, dict[str, Array]],
) -> None:
    path, _ = quantized
    model, _ = load_gguf(read_header(path), None)
    assert [module.bits for _, module in modules(model)] == [8, 4, 4, 4]
    assert {module.group_size for _, module in modules(model)} == {32}
    assert isinstance(model.layers[0].mlp.up_proj, nn.Linear)
    logits = model(TOKENS)
    assert logits.dtype == mx.float16
    dense, _ = load_gguf(read_header(path), mx.float32)
    expected = dense(TOKENS)
    assert mx.abs(logits - expected).max() < 0.02 * mx.abs(expected).max()


def modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    yield "token_embd", model.model.embed_tokens
    yield "blk.0.attn_q", model.layers[0].self_attn.q_proj
    yield "blk.0.attn_k", model.layers[0].self_attn.k_proj
    yield "blk.1.ffn_up", model.layers[1].mlp.up_proj


@pytest.fixture
def file(tmp_path: Path) -> tuple[Path, Metadata, Tensors]:
    model, config = random_model("llama")
    return tmp_path / "m.gguf", metadata_of(config), tensors_of(model, config)


def rejection(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_gguf(read_header(path), mx.float32)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        (
            {"general.architecture": "made-up"},
            "architecture made-up is not known: take the model as MLX or",
        ),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.rope.dimension_count": 16}, "rotary"),
        ({"llama.attention.value_length": 16}, "differ in size"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "rope scaling none"),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.yarn_log_multiplier": 0.1,
            },
            "rope scaling yarn",
        ),
        ({"llama.attention.causal": False}, "not causal"),
        ({"llama.attention.head_count": [4, 2]}, "not one number"),
        ({"llama.attention.head_count": 0}, "0 attention heads"),
        ({"llama.attention.key_length": 0}, "heads have a size of 0"),
        ({"llama.logit_scale": 2.0}, "scaled embeddings, residuals or logits"),
        ({"llama.final_logit_softcapping": 30.0}, "soft caps"),
        ({"llama.attention.temperature_scale": 0.1}, "attention scaled by position"),
        ({"llama.attention.recurrent_layers": [True, False]}, "recurrent layers"),
        ({"split.count": 3}, "split file"),
    ],
)
def test_what_would_be_computed_differently_is_rejected(
    file: tuple[Path, Metadata, Tensors], metadata: Metadata, reason: str
) -> None:
    path, base, tensors = file
    assert reason in rejection(write_gguf(path, base | metadata, tensors))


def test_a_later_part_of_a_split_file_is_known_as_one(tmp_path: Path) -> None:
    part = write_gguf(tmp_path / "m-00002-of-00003.gguf", {"split.no": 1, "split.count": 3}, {})
    with pytest.raises(ModelLoadError, match="join the parts first"):
        load_model(str(part), dtype=None)


@pytest.mark.parametrize(("kind", "name"), [(F64, "F64"), (99, "number 99")])
def test_a_tensor_type_that_is_not_supported_is_named(
    file: tuple[Path, Metadata, Tensors], kind: int, name: str
) -> None:
    path, metadata, tensors = file
    tensors["blk.1.ffn_up.weight"] = RawTensor(kind, (96, 128), bytes(96 * 128 * 8))
    message = rejection(write_gguf(path, metadata, tensors))
    assert f"tensor blk.1.ffn_up.weight has type {name}, which is not supported" in message


def test_rows_that_are_no_whole_blocks_are_rejected(file: tuple[Path, Metadata, Tensors]) -> None:
    path, metadata, tensors = file
    tensors["blk.1.ffn_up.weight"] = RawTensor(Q4_K, (96, 128), bytes(96 * 144))
    assert "no whole blocks of 256" in rejection(write_gguf(path, metadata, tensors))


def test_tensors_that_do_not_fit_the_metadata_are_rejected(
    file: tuple[Path, Metadata, Tensors],
) -> None:
    path, metadata, tensors = file
    odd = tensors | {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    assert "unknown tensor blk.0.attn_sinks.weight" in rejection(write_gguf(path, metadata, odd))
    del tensors["output_norm.weight"]
    assert "disagree" in rejection(write_gguf(path, metadata, tensors))
    del tensors["token_embd.weight"]
    assert "token_embd" in rejection(write_gguf(path, metadata, tensors))


def test_a_damaged_file_is_rejected_wherever_it_ends(
    file: tuple[Path, Metadata, Tensors],
) -> None:
    path, metadata, tensors = file
    content = write_gguf(path, metadata, tensors).read_bytes()
    for length in [0, 3, 10, 24, 100, 700, len(content) // 2, len(content) - 64]:
        path.write_bytes(content[:length])
        assert "incomplete" in rejection(path) or "not a GGUF file" in rejection(path)
    path.write_bytes(b"GGML" + content[4:])
    assert "not a GGUF file" in rejection(path)
    assert "version 1" in rejection(write_gguf(path, metadata, tensors, version=1))
    path.unlink()
    assert "No such file" in rejection(path)
