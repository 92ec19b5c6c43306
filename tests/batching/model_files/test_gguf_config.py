"""The sizes of GGUF files of each family, by mlx-lm's names."""

from pathlib import Path
from typing import Any

import numpy as np

from batching.model_files.gguf_config import outline_config
from batching.model_files.gguf_header import GgufHeader, read_header
from tests.support.gguf_writer import Value, write_gguf


def header_of(
    folder: Path, family: str, values: dict[str, Value], tensor: str = "t.weight"
) -> GgufHeader:
    metadata: dict[str, Value] = {f"{family}.{key}": value for key, value in values.items()}
    metadata["general.architecture"] = family
    return read_header(
        write_gguf(folder / "m.gguf", metadata, {tensor: np.ones((2, 2), np.float32)})
    )


def config_of(*arguments: Any, **more: Any) -> dict[str, Any]:
    return outline_config(header_of(*arguments, **more))


def test_an_architecture_that_is_not_known_has_no_type(tmp_path: Path) -> None:
    config = config_of(tmp_path, "bert", {"block_count": 3, "embedding_length": 8})
    assert config == {"num_hidden_layers": 3, "hidden_size": 8}


def test_layers_for_further_tokens_do_not_count(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen3", {"block_count": 5, "nextn_predict_layers": 1})
    assert config == {"model_type": "qwen3", "num_hidden_layers": 4}


def test_what_is_no_number_is_no_size(tmp_path: Path) -> None:
    values: dict[str, Value] = {"block_count": "x", "embedding_length": 1e30}
    assert config_of(tmp_path, "llama", values) == {"model_type": "llama", "num_hidden_layers": 0}


def test_convolutions_have_no_heads(tmp_path: Path) -> None:
    values: dict[str, Value] = {"block_count": 3, "attention.head_count_kv": [0, 4, 0]}
    config = config_of(tmp_path, "lfm2", values)
    assert config["layer_types"] == ["conv", "full_attention", "conv"]
    assert config["num_key_value_heads"] == 4


def test_gemma_without_windows(tmp_path: Path) -> None:
    assert config_of(tmp_path, "gemma3", {})["sliding_window_pattern"] == 1
    config = config_of(tmp_path, "gemma3", {"attention.sliding_window": 512})
    assert "sliding_window_pattern" not in config


def test_the_width_of_a_delta_net(tmp_path: Path) -> None:
    values: dict[str, Value] = {"ssm.inner_size": 64, "ssm.time_step_rank": 4}
    assert config_of(tmp_path, "qwen3next", values)["linear_value_head_dim"] == 16


def test_the_second_deepseek_keeps_no_latents(tmp_path: Path) -> None:
    values: dict[str, Value] = {
        "rope.dimension_count": 8,
        "attention.key_length": 24,
        "attention.value_length_mla": 12,
    }
    config = config_of(tmp_path, "deepseek2", values)
    assert config["model_type"] == "deepseek_v2"
    assert (config["qk_nope_head_dim"], config["v_head_dim"]) == (16, 12)
    gated = values | {"expert_gating_func": 2}
    assert config_of(tmp_path, "deepseek2", gated)["model_type"] == "deepseek_v3"
    named = config_of(tmp_path, "deepseek2", values, tensor="blk.1.exp_probs_b.bias")
    assert named["model_type"] == "deepseek_v3"
