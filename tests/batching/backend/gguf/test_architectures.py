"""Every architecture: a file computes what the model computes that it was written from."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import mlx.core as mx
import mlx.nn as nn
import pytest
from gguf import GGMLQuantizationType as Type

from batching.backend.gguf.architecture.changes import join_latent
from batching.backend.gguf.architecture.known import ARCHITECTURES
from batching.backend.gguf.config import read_config
from batching.backend.gguf.file.quantizations import Weight
from batching.model_files.context_length import declared_context
from batching.model_files.gguf_formats import Format
from batching.model_files.gguf_header import read_header
from tests.support.arrays import parameters
from tests.support.gguf_architectures import TINY, VARIANTS, Array
from tests.support.gguf_converter import random_model, write_model
from tests.support.gguf_models import load_gguf
from tests.support.weekly import weekly

TOKENS: Final = mx.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3] * 3])


def logits_of(path: Path, dtype: mx.Dtype | None) -> mx.array:
    model, _ = load_gguf(read_header(path), dtype)
    logits: mx.array = model(TOKENS)
    return logits


def assert_close(found: mx.array, expected: mx.array, tolerance: float = 1e-4) -> None:
    """The models amplify: theirs and llama.cpp's logits are as far apart as ours."""
    assert mx.abs(found - expected).max() < tolerance * mx.abs(expected).max()


def test_every_architecture_is_tested() -> None:
    assert TINY.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("name", TINY)
def test_a_file_computes_what_its_model_computes(tmp_path: Path, name: str) -> None:
    model, config = random_model(TINY[name])
    path = write_model(tmp_path / "m.gguf", TINY[name], model, config)
    assert_close(logits_of(path, mx.float32), model(TOKENS))


def in_8_bits(name: str, value: Array) -> Type:
    """Quantize more than llama.cpp does: all but norms, biases and convolutions."""
    kept = value.ndim < 2 or value.shape[-1] % 32 or "bias" in name or "conv." in name
    return Type.F32 if kept else Type.Q8_0


@pytest.mark.parametrize("name", weekly(TINY, 5))
def test_quantized_weights_take_part_in_every_change(tmp_path: Path, name: str) -> None:
    model, config = random_model(TINY[name])
    path = write_model(tmp_path / "m.gguf", TINY[name], model, config, in_8_bits)
    stored, _ = load_gguf(read_header(path), None)
    dense = parameters(load_gguf(read_header(path), mx.float32)[0])
    weights = dict(weights_of(stored))
    assert weights.keys() <= dense.keys()
    assert len(weights) > 10
    # Scales may be rounded to bfloat16.
    tolerance = 1e-2 if ARCHITECTURES[name].half == mx.bfloat16 else 2e-3
    for weight, array in weights.items():
        assert mx.allclose(array, dense[weight], rtol=tolerance, atol=tolerance), weight


def weights_of(model: nn.Module) -> Iterator[tuple[str, mx.array]]:
    """Yield the weights that are stored quantized, as their formats say."""
    for name, module in model.named_modules():
        if "scales" in module:
            names = [
                part for part in ("weight", "scales", "biases") if module.get(part) is not None
            ]
            kept = Format(module.bits, module.group_size, module.mode)
            yield f"{name}.weight", Weight({part: module[part] for part in names}, kept).dense()


@pytest.mark.parametrize("name", weekly(TINY, 5))
def test_for_the_kernels_no_bit_is_lost(tmp_path: Path, name: str) -> None:
    model, config = random_model(TINY[name])
    path = write_model(tmp_path / "m.gguf", TINY[name], model, config, in_8_bits)
    stored, _ = load_gguf(read_header(path), None, has_kernels=True)
    dense = parameters(load_gguf(read_header(path), mx.float32)[0])
    floats = {n: a for n, a in parameters(stored).items() if "scales" not in n and n in dense}
    assert all(mx.array_equal(a, dense[n]) for n, a in floats.items() if a.dtype == mx.float32)
    for weight, array in weights_of(stored):
        assert mx.abs(array - dense[weight]).max() <= 2e-7 * mx.abs(array).max(), weight


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3moe"])
def test_experts_of_mxfp4_stay_as_they_are(tmp_path: Path, name: str) -> None:
    def mxfp4(name: str, value: Array) -> Type:
        return Type.MXFP4 if "_exps.weight" in name else in_8_bits(name, value)

    model, config = random_model(TINY[name])
    path = write_model(tmp_path / "m.gguf", TINY[name], model, config, mxfp4)
    stored, _ = load_gguf(read_header(path), None)
    experts = [
        module for _, module in stored.named_modules() if getattr(module, "mode", "") == "mxfp4"
    ]
    assert len(experts) == 3 * config["num_hidden_layers"]
    dense = parameters(load_gguf(read_header(path), mx.float32)[0])
    for weight, array in weights_of(stored):
        assert mx.allclose(array, dense[weight], rtol=1e-2, atol=1e-2), weight


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3moe"])
@pytest.mark.parametrize("dtype", [None, mx.float32])
def test_gates_and_what_they_let_through_may_be_one_tensor(
    tmp_path: Path, name: str, dtype: mx.Dtype | None
) -> None:
    model, config = random_model(TINY[name])
    apart = write_model(tmp_path / "apart.gguf", TINY[name], model, config, in_8_bits)
    joined = write_model(
        tmp_path / "joined.gguf", TINY[name], model, config, in_8_bits, joins_gates=True
    )
    assert any("gate_up" in tensor for tensor in read_header(joined).tensors)
    assert mx.array_equal(logits_of(joined, dtype), logits_of(apart, dtype))


@pytest.mark.parametrize(("stored", "dtype"), [(Type.F16, mx.float16), (Type.BF16, mx.bfloat16)])
def test_floats_keep_the_type_of_the_matrices(
    tmp_path: Path, stored: Type, dtype: mx.Dtype
) -> None:
    model, config = random_model(TINY["qwen3"])
    path = write_model(
        tmp_path / "m.gguf",
        TINY["qwen3"],
        model,
        config,
        lambda _, value: Type.F32 if value.ndim < 2 else stored,
    )
    loaded, _ = load_gguf(read_header(path), None)
    assert {array.dtype for array in parameters(loaded).values()} == {dtype}
    assert_close(loaded(TOKENS).astype(mx.float32), model(TOKENS), 0.1)


@pytest.mark.parametrize(
    ("name", "norm"),
    [("gemma3", "post_feedforward_layernorm"), ("glm4", "post_mlp_layernorm")],
)
def test_activations_may_exceed_float16(tmp_path: Path, name: str, norm: str) -> None:
    model, config = random_model(TINY[name])
    # float16 ends at 65,504, which this times a norm's output exceeds.
    large = {n: 4e4 * array for n, array in parameters(model).items() if f"{norm}.weight" in n}
    assert len(large) == config["num_hidden_layers"]
    model.load_weights(list(large.items()), strict=False)
    path = write_model(
        tmp_path / "m.gguf",
        TINY[name],
        model,
        config,
        lambda _, value: Type.F32 if value.ndim < 2 else Type.F16,
    )
    loaded, _ = load_gguf(read_header(path), None)
    assert_close(loaded(TOKENS).astype(mx.float32), model(TOKENS), 0.2)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_an_architecture(tmp_path: Path, name: str) -> None:
    model, config = random_model(VARIANTS[name])
    path = write_model(tmp_path / "m.gguf", VARIANTS[name], model, config)
    _, loaded_config = load_gguf(read_header(path), mx.float32)
    assert loaded_config["model_type"] == config["model_type"]
    assert_close(logits_of(path, mx.float32), model(TOKENS))


def test_the_context_of_gemma3_is_that_after_scaling(tmp_path: Path) -> None:
    tiny = VARIANTS["gemma3 of long contexts"]
    model, config = random_model(tiny)
    header = read_header(write_model(tmp_path / "m.gguf", tiny, model, config))
    assert declared_context(read_config(header)) == config["max_position_embeddings"]


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    model, config = random_model(TINY["qwen3moe"])
    tiny = replace(TINY["qwen3moe"], settings=_MOE_WITH_ONE_MORE)
    path = write_model(tmp_path / "m.gguf", tiny, model, config)
    loaded, loaded_config = load_gguf(read_header(path), mx.float32)
    assert loaded_config["num_hidden_layers"] == len(loaded.layers) == 3
    model.model.layers.pop()
    assert_close(loaded(TOKENS), model(TOKENS))


_MOE_WITH_ONE_MORE: Final = TINY["qwen3moe"].settings | {"nextn_predict_layers": lambda _: 1}


def test_older_files_have_one_matrix_for_the_keys_and_values_of_a_latent() -> None:
    model, config = random_model(TINY["deepseek2"])
    arrays = parameters(model)
    weights: dict[str, Weight] = {}
    for layer in range(config["num_hidden_layers"]):
        attention = f"model.layers.{layer}.self_attn"
        keys = arrays[f"{attention}.embed_q.weight"].swapaxes(1, 2)
        values = arrays[f"{attention}.unembed_out.weight"]
        joined = mx.concatenate([keys, values], axis=1).flatten(0, 1)
        weights[f"{attention}.kv_b_proj.weight"] = Weight({"weight": joined})
    join_latent(weights, config)
    assert len(weights) == 2 * config["num_hidden_layers"]
    for name, weight in weights.items():
        assert mx.array_equal(weight.dense(), arrays[name]), name
