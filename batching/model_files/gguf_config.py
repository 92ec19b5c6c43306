"""The sizes of a GGUF file's model by the names of mlx-lm's config, as far as its memory depends on them."""

from collections.abc import Mapping
from typing import Any, Final

from batching.model_files.gguf_header import GgufHeader

_MODEL_TYPES: Final[Mapping[str, str]] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma3": "gemma3_text",
    "gpt-oss": "gpt_oss",
    "qwen35": "qwen3_5",
    "qwen35moe": "qwen3_5_moe",
    "qwen3next": "qwen3_next",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2_moe",
    "phi3": "phi3",
    "granite": "granite",
    "glm4": "glm4",
    "deepseek2": "deepseek_v3",
}
_SIZES: Final[Mapping[str, str]] = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_key_head_dim": "ssm.state_size",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "full_attention_interval": "full_attention_interval",
    "conv_L_cache": "shortconv.l_cache",
}
_SIGMOID: Final = 2


def outline_config(header: GgufHeader) -> dict[str, Any]:
    """Return the sizes that a file declares; without a model type, its architecture is not served."""
    family = header.text("general.architecture") or ""
    config: dict[str, Any] = {
        name: size
        for name, key in _SIZES.items()
        if (size := _size(header, f"{family}.{key}")) is not None
    }
    if (model_type := _MODEL_TYPES.get(family)) is None:
        return config
    layers = _size(header, f"{family}.block_count") or 0
    further = _size(header, f"{family}.nextn_predict_layers") or 0
    config |= {"model_type": model_type, "num_hidden_layers": layers - further}
    return config | _of_family(header, family, config)


def _of_family(header: GgufHeader, family: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return what a family's files say in a way of their own."""
    if family.startswith("lfm2"):
        counts = header.numbers(f"{family}.attention.head_count_kv")
        return {"layer_types": ["full_attention" if count else "conv" for count in counts]}
    if family == "gemma3" and not config.get("sliding_window"):
        return {"sliding_window_pattern": 1, "sliding_window": 1 << 30}
    if family == "deepseek2":
        return _of_latents(header, config)
    width, heads = (
        _size(header, f"{family}.ssm.{key}") for key in ("inner_size", "time_step_rank")
    )
    return {"linear_value_head_dim": width // heads} if width and heads else {}


def _of_latents(header: GgufHeader, config: dict[str, Any]) -> dict[str, Any]:
    """Tell DeepSeek V2, which mlx-lm keeps keys and values of, from V3; see gguf/architecture/values.py."""
    gate = _size(header, "deepseek2.expert_gating_func") or 0
    has_bias = any(name.endswith(".exp_probs_b.bias") for name in header.tensors)
    if gate == _SIGMOID or (gate == 0 and has_bias):
        return {}
    rotated = config.get("qk_rope_head_dim", 0)
    key, value = (
        _size(header, f"deepseek2.attention.{name}_mla")
        or _size(header, f"deepseek2.attention.{name}")
        or 0
        for name in ("key_length", "value_length")
    )
    sizes = {"qk_nope_head_dim": key - rotated, "v_head_dim": value}
    return {"model_type": "deepseek_v2", **sizes}


def _size(header: GgufHeader, key: str) -> int | None:
    """Return a number; of a number for each layer the largest."""
    if numbers := header.numbers(key):
        return int(max(numbers))
    value = header.metadata.get(key)
    return int(value) if isinstance(value, int | float) and abs(value) < 1 << 53 else None
