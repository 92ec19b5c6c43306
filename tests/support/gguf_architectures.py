"""Small configs of each architecture, and how llama.cpp's converter writes such a model."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Config = dict[str, Any]
Change = Callable[[Array, Config], Array]
Quantize = Callable[[str, Array], gguf.GGMLQuantizationType]

_MOE: Final[Config] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_DELTA_NET: Final[Config] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
}
_ROPE: Final[Config] = {
    "rope_parameters": {"type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}
}
_LATENT: Final[Config] = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
}

_OF_MOE: Final = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_OF_DELTA_NET: Final = {
    "ssm_conv_kernel": "linear_conv_kernel_dim",
    "ssm_state_size": "linear_key_head_dim",
    "ssm_group_count": "linear_num_key_heads",
    "ssm_time_step_rank": "linear_num_value_heads",
    "full_attention_interval": "full_attention_interval",
}


def _unpaired(num_heads: str) -> Change:
    """Put the numbers that are rotated together side by side, as llama.cpp's converter does."""

    def change(value: Array, config: Config) -> Array:
        halves = value.reshape(config[num_heads], 2, -1, *value.shape[1:])
        swapped: Array = halves.swapaxes(1, 2).reshape(value.shape)
        return swapped

    return change


def _parted(num_heads: str) -> Change:
    """Put the first numbers of rotated pairs before the second ones, as the converter does for GLM's of images."""

    def change(value: Array, config: Config) -> Array:
        heads = value.reshape(config[num_heads], config["head_dim"], *value.shape[1:])
        rotated = int(config["head_dim"] * config["partial_rotary_factor"])
        parts = heads[:, :rotated:2], heads[:, 1:rotated:2], heads[:, rotated:]
        parted: Array = np.concatenate(parts, axis=1).reshape(value.shape)
        return parted

    return change


def _by_place(value: Array, config: Config) -> Array:
    """Put the first value heads of all key heads first, then the second ones."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    by_key = value.reshape(keys, values // keys, -1)
    moved: Array = by_key.swapaxes(0, 1).reshape(value.shape)
    return moved


def _values_by_place(value: Array, config: Config) -> Array:
    keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    return np.concatenate([value[:keys], _by_place(value[keys:], config)])


def _decay(value: Array, _: Config) -> Array:
    decay: Array = -np.exp(value)
    return decay


@dataclass(frozen=True)
class Tiny:
    """A model of mlx-lm, and how it is written.

    renames: parts of mlx-lm's names, and what a Hugging Face checkpoint has in their place.
    changes: by the end of that name, what is done to a tensor.
    """

    arch: gguf.MODEL_ARCH
    model_type: str
    config: Config = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    renames: Mapping[str, str] = field(default_factory=dict)
    changes: Mapping[str, Change] = field(default_factory=dict)


_EXPERTS: Final = {".switch_mlp.": ".experts."}
_QWEN3_5: Final = {
    "language_model.": "",
    "dt_bias": "dt_proj.bias",
} | _EXPERTS
_SQUEEZED: Final[dict[str, Change]] = {
    "conv1d.weight": lambda value, _: value[..., 0],
    "A_log": _decay,
}
_BY_PLACE: Final[dict[str, Change]] = {
    "in_proj_qkv.weight": _values_by_place,
    "in_proj_z.weight": _by_place,
    "in_proj_a.weight": _by_place,
    "in_proj_b.weight": _by_place,
    "dt_proj.bias": _by_place,
    "A_log": lambda value, config: _by_place(_decay(value, config), config),
    "conv1d.weight": lambda value, config: _values_by_place(value[..., 0], config),
    "linear_attn.out_proj.weight": lambda value, config: _by_place(value.T, config).T,
}
_OF_QWEN3_5: Final[dict[str, Any]] = _OF_DELTA_NET | {
    "ssm_inner_size": lambda c: c["linear_num_value_heads"] * c["linear_value_head_dim"],
    "rope_dimension_count": lambda c: int(c["head_dim"] * c["partial_rotary_factor"]),
}
_SECTIONS: Final[dict[str, Callable[[Config], Any]]] = {
    "rope_dimension_sections": lambda _: [2, 1, 1, 0]
}
_SHARED: Final[dict[str, str]] = {
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size"
}
_GRANITE: Final[Config] = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
    "attention_bias": False,
    "mlp_bias": False,
}
_LFM2: Final[Config] = {
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "full_attn_idxs": [1, 3],
    "block_dim": 64,
    "block_ff_dim": 96,
    "block_multiple_of": 1,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "tie_word_embeddings": True,
}
_OF_YARN: Final[dict[str, Callable[[Config], Any]]] = {
    "rope_scaling_type": lambda _: gguf.RopeScalingType.YARN,
    "rope_scaling_factor": lambda c: c["rope_scaling"]["factor"],
    "rope_scaling_orig_ctx_len": lambda c: c["rope_scaling"]["original_max_position_embeddings"],
    "rope_scaling_yarn_log_mul": lambda c: 0.1 * c["rope_scaling"].get("mscale_all_dim", 0),
}
_OF_LFM2: Final[dict[str, Any]] = {
    "shortconv_l_cache": "conv_L_cache",
    "head_count_kv": lambda c: [
        c["num_key_value_heads"] if i in c["full_attn_idxs"] else 0
        for i in range(c["num_hidden_layers"])
    ],
}
_CONV: Final[dict[str, Change]] = {"conv.conv.weight": lambda value, _: value[..., 0]}

TINY: Final[dict[str, Tiny]] = {
    "llama": Tiny(
        gguf.MODEL_ARCH.LLAMA,
        "llama",
        changes={
            "q_proj": _unpaired("num_attention_heads"),
            "k_proj": _unpaired("num_key_value_heads"),
        },
    ),
    "qwen2": Tiny(gguf.MODEL_ARCH.QWEN2, "qwen2"),
    "qwen3": Tiny(gguf.MODEL_ARCH.QWEN3, "qwen3", {"head_dim": 32}),
    "qwen3moe": Tiny(gguf.MODEL_ARCH.QWEN3MOE, "qwen3_moe", _MOE, _OF_MOE, _EXPERTS),
    "gemma3": Tiny(
        gguf.MODEL_ARCH.GEMMA3,
        "gemma3_text",
        {
            "num_hidden_layers": 7,
            "tie_word_embeddings": True,
            "sliding_window": 8,
            "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 16,
            "rope_local_base_freq": 10000.0,
        },
        {"sliding_window": "sliding_window"},
        changes={"norm.weight": lambda value, _: value + 1},
    ),
    "gpt-oss": Tiny(
        gguf.MODEL_ARCH.GPT_OSS,
        "gpt_oss",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "truncate": False,
            },
        },
        _OF_YARN
        | {
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
            "sliding_window": "sliding_window",
        },
        {"sinks": "sinks.weight"},
    ),
    "qwen35": Tiny(
        gguf.MODEL_ARCH.QWEN35,
        "qwen3_5",
        _DELTA_NET | _ROPE,
        _OF_QWEN3_5 | _SECTIONS,
        _QWEN3_5,
        _BY_PLACE,
    ),
    "qwen35moe": Tiny(
        gguf.MODEL_ARCH.QWEN35MOE,
        "qwen3_5_moe",
        _DELTA_NET | _ROPE | _MOE | {"shared_expert_intermediate_size": 48},
        _OF_QWEN3_5 | _SECTIONS | _OF_MOE | _SHARED,
        _QWEN3_5,
        _BY_PLACE,
    ),
    "qwen3next": Tiny(
        gguf.MODEL_ARCH.QWEN3NEXT,
        "qwen3_next",
        _DELTA_NET | _MOE | {"shared_expert_intermediate_size": 48},
        _OF_QWEN3_5 | _OF_MOE | _SHARED,
        _QWEN3_5,
        _SQUEEZED,
    ),
    "lfm2": Tiny(gguf.MODEL_ARCH.LFM2, "lfm2", _LFM2, _OF_LFM2, {}, _CONV),
    "lfm2moe": Tiny(
        gguf.MODEL_ARCH.LFM2MOE,
        "lfm2_moe",
        _LFM2 | _MOE | {"num_dense_layers": 1, "use_expert_bias": True},
        _OF_LFM2
        | _OF_MOE
        | {
            "leading_dense_block_count": "num_dense_layers",
            "expert_gating_func": lambda _: gguf.ExpertGatingFuncType.SIGMOID,
        },
        {
            "switch_mlp": "experts",
            "feed_forward.gate_proj": "feed_forward.w1",
            "feed_forward.up_proj": "feed_forward.w3",
            "feed_forward.down_proj": "feed_forward.w2",
            "experts.gate_proj": "experts.w1",
            "experts.up_proj": "experts.w3",
            "experts.down_proj": "experts.w2",
            "expert_bias": "expert_bias.bias",
        },
        _CONV,
    ),
    "phi3": Tiny(
        gguf.MODEL_ARCH.PHI3,
        "phi3",
        {"partial_rotary_factor": 0.5},
        {"rope_dimension_count": lambda c: c["head_dim"] // 2},
    ),
    "granite": Tiny(
        gguf.MODEL_ARCH.GRANITE,
        "granite",
        _GRANITE,
        {
            "attention_scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        changes={
            "q_proj": _unpaired("num_attention_heads"),
            "k_proj": _unpaired("num_key_value_heads"),
        },
    ),
    "glm4": Tiny(
        gguf.MODEL_ARCH.GLM4,
        "glm4",
        {"attention_bias": True, "partial_rotary_factor": 0.5},
        {"rope_dimension_count": lambda c: c["head_dim"] // 2},
    ),
    "deepseek2": Tiny(
        gguf.MODEL_ARCH.DEEPSEEK2,
        "deepseek_v3",
        _LATENT | {"rms_norm_eps": 1e-6, "norm_topk_prob": True},
        _OF_MOE
        | {
            "expert_count": "n_routed_experts",
            "q_lora_rank": "q_lora_rank",
            "kv_lora_rank": "kv_lora_rank",
            "head_count_kv": lambda _: 1,
            "key_length": lambda c: c["kv_lora_rank"] + c["qk_rope_head_dim"],
            "value_length": "kv_lora_rank",
            "key_length_mla": lambda c: c["qk_nope_head_dim"] + c["qk_rope_head_dim"],
            "value_length_mla": "v_head_dim",
            "rope_dimension_count": "qk_rope_head_dim",
            "expert_shared_count": "n_shared_experts",
            "leading_dense_block_count": "first_k_dense_replace",
            "expert_weights_scale": "routed_scaling_factor",
            "expert_weights_norm": "norm_topk_prob",
            "expert_gating_func": lambda _: gguf.ExpertGatingFuncType.SIGMOID,
        },
        {
            ".switch_mlp.": ".experts.",
            "embed_q": "k_b_proj",
            "unembed_out": "v_b_proj",
            "e_score_correction_bias": "e_score_correction.bias",
        },
    ),
}


def _variant(name: str, model_type: str | None = None, **changes: Any) -> Tiny:
    tiny = TINY[name]
    settings = changes.pop("settings", {})
    return replace(
        tiny,
        model_type=model_type or tiny.model_type,
        config=tiny.config | changes,
        settings=tiny.settings | settings,
    )


_YARN: Final[Config] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_LONGROPE: Final[Config] = {
    "type": "longrope",
    "long_factor": [1.0, 2.0, 3.0, 5.0],
    "short_factor": [1.0, 1.1, 1.2, 1.3],
}
VARIANTS: Final[dict[str, Tiny]] = {
    "llama with biases": _variant("llama", attention_bias=True),
    "granite with biases": _variant("granite", attention_bias=True),
    "tied qwen3": _variant("qwen3", tie_word_embeddings=True),
    "tied phi3": _variant("phi3", tie_word_embeddings=True),
    "phi3 of long contexts": _variant(
        "phi3",
        rope_scaling=_LONGROPE,
        original_max_position_embeddings=128,
        settings={
            "rope_scaling_orig_ctx_len": "original_max_position_embeddings",
            "rope_scaling_attn_factors": lambda _: math.sqrt(1 + math.log(4) / math.log(128)),
        },
    ),
    "gemma3 of long contexts": _variant(
        "gemma3",
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        settings={
            "rope_scaling_type": lambda _: gguf.RopeScalingType.LINEAR,
            "rope_scaling_factor": lambda c: c["rope_scaling"]["factor"],
        },
    ),
    "gemma3 with another pattern": _variant(
        "gemma3",
        sliding_window_pattern=2,
        settings={"sliding_window_pattern": "sliding_window_pattern"},
    ),
    "glm-4.6v": replace(
        _variant("glm4", settings={"rope_dimension_sections": lambda _: [2, 1, 1, 0]}),
        changes={
            "q_proj": _parted("num_attention_heads"),
            "k_proj": _parted("num_key_value_heads"),
        },
    ),
    "qwen35 of as many heads": _variant("qwen35", linear_num_value_heads=2),
    "tied qwen35": _variant("qwen35", tie_word_embeddings=True),
    "deepseek2 of long contexts": _variant("deepseek2", rope_scaling=_YARN, settings=_OF_YARN),
    "glm-4.7-flash": _variant("deepseek2", "glm4_moe_lite", rms_norm_eps=1e-5),
    "deepseek-v2": _variant(
        "deepseek2",
        "deepseek_v2",
        rms_norm_eps=1e-6,
        norm_topk_prob=False,
        topk_method="greedy",
        rope_scaling=_YARN,
        settings=_OF_YARN | {"expert_gating_func": lambda _: gguf.ExpertGatingFuncType.SOFTMAX},
    ),
}
