"""Configs whose authors leave values to transformers, or that transformers 5 has saved."""

from typing import Any, Final

from batching.backend.former_config import former_values

# LLaVA 1.5 says no more of its text model.
LLAVA: Final[dict[str, Any]] = {
    "model_type": "llava",
    "text_config": {"model_type": "llama", "vocab_size": 32064, "rms_norm_eps": 1e-5},
}


def test_sizes_are_those_that_transformers_takes_for_granted() -> None:
    text = former_values(LLAVA)["text_config"]
    assert text["hidden_size"] == 4096
    assert (text["num_hidden_layers"], text["num_attention_heads"]) == (32, 32)
    assert (text["vocab_size"], text["rope_theta"]) == (32064, 10000.0)


def test_a_renamed_value_has_its_former_name_too() -> None:
    saved = {"model_type": "qwen3_vl_moe_text", "hidden_size": 8, "num_local_experts": 4}
    config = {"model_type": "qwen3_vl_moe", "text_config": saved}
    assert former_values(config) == {"text_config": saved | {"num_experts": 4}}


def test_a_config_that_says_all_lacks_nothing() -> None:
    complete = LLAVA["text_config"] | {"hidden_size": 8}
    assert former_values(LLAVA | {"text_config": complete}) == {}
    assert former_values({"model_type": "x", "text_config": {"model_type": "none"}}) == {}
    assert former_values({"model_type": "qwen2"}) == {}
