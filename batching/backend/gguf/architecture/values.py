"""Values that only some architectures have in their config, computed from the file's metadata."""

from collections.abc import Callable
from typing import Any, Final

from batching.backend.gguf.architecture.metadata import ModelMetadata

Values = dict[str, Callable[[ModelMetadata], Any]]

_LAYERS_OF_GEMMA3_27B: Final = 62
_SIGMOID: Final = 2
_NO_WINDOW: Final = 1 << 30


def _has_sigmoid_gate(metadata: ModelMetadata) -> bool:
    """Tell DeepSeek V3 and its kin from V2; the first files of GLM-4.7-Flash do not say."""
    gate = metadata.integer("expert_gating_func", 0)
    return gate == _SIGMOID or (gate == 0 and metadata.has_tensor("exp_probs_b.bias"))


def _latent_model_type(metadata: ModelMetadata) -> str:
    """Return the model whose latent norms have the file's epsilon: in deepseek_v3 it is fixed."""
    if not _has_sigmoid_gate(metadata):
        return "deepseek_v2"
    is_fixed = metadata.number("attention.layer_norm_rms_epsilon") < 2e-6
    return "deepseek_v3" if is_fixed else "glm4_moe_lite"


MOE: Final[Values] = {
    "num_experts": lambda m: m.integer("expert_count"),
    "num_experts_per_tok": lambda m: m.integer("expert_used_count"),
    "moe_intermediate_size": lambda m: m.integer("expert_feed_forward_length"),
    "norm_topk_prob": lambda _: True,
    "decoder_sparse_step": lambda _: 1,
    "mlp_only_layers": lambda _: [],
}
SHARED_EXPERT: Final[Values] = {
    "shared_expert_intermediate_size": lambda m: m.integer(
        "expert_shared_feed_forward_length", m.integer("expert_feed_forward_length")
    ),
}
DELTA_NET: Final[Values] = {
    "linear_num_key_heads": lambda m: m.integer("ssm.group_count"),
    "linear_num_value_heads": lambda m: m.integer("ssm.time_step_rank"),
    "linear_key_head_dim": lambda m: m.integer("ssm.state_size"),
    "linear_value_head_dim": lambda m: (
        m.integer("ssm.inner_size") // max(1, m.integer("ssm.time_step_rank"))
    ),
    "linear_conv_kernel_dim": lambda m: m.integer("ssm.conv_kernel"),
    "full_attention_interval": lambda m: m.integer("full_attention_interval", 4),
}
QWEN3_5: Final[Values] = DELTA_NET | {
    "rope_parameters": lambda m: {
        "type": "default",
        "rope_theta": m.number("rope.freq_base", 10000.0),
        "partial_rotary_factor": m.rotated_share,
    },
}
GEMMA3: Final[Values] = {
    "sliding_window": lambda m: m.integer("attention.sliding_window", 0) or _NO_WINDOW,
    "sliding_window_pattern": lambda m: (
        m.integer("attention.sliding_window_pattern", 6)
        if m.integer("attention.sliding_window", 0)
        else 1
    ),
    "rope_local_base_freq": lambda m: m.number("rope.freq_base_swa", 10000.0),
    "query_pre_attn_scalar": lambda m: (
        m.integer("embedding_length") // m.num_heads
        if m.num_layers == _LAYERS_OF_GEMMA3_27B
        else m.head_dim
    ),
}
GPT_OSS: Final[Values] = {
    "num_local_experts": lambda m: m.integer("expert_count"),
    "num_experts_per_tok": lambda m: m.integer("expert_used_count"),
    "intermediate_size": lambda m: m.integer("expert_feed_forward_length"),
    "sliding_window": lambda m: m.integer("attention.sliding_window"),
    "layer_types": lambda m: [
        "full_attention" if index % 2 else "sliding_attention" for index in range(m.num_layers)
    ],
}
LFM2: Final[Values] = {
    "norm_eps": lambda m: m.number("attention.layer_norm_rms_epsilon"),
    "conv_bias": lambda _: False,
    "conv_L_cache": lambda m: m.integer("shortconv.l_cache"),
    "full_attn_idxs": lambda m: m.full_attention_layers,
    "block_dim": lambda m: m.integer("embedding_length"),
    "block_ff_dim": lambda m: m.integer("feed_forward_length"),
    "block_multiple_of": lambda _: 1,
    "block_ffn_dim_multiplier": lambda _: 1.0,
    "block_auto_adjust_ff_dim": lambda _: False,
}
LFM2_MOE: Final[Values] = (
    LFM2
    | MOE
    | {
        "num_dense_layers": lambda m: m.integer("leading_dense_block_count", 0),
        "use_expert_bias": lambda m: m.has_tensor("exp_probs_b.bias"),
        "routed_scaling_factor": lambda m: m.number("expert_weights_scale", 1.0),
    }
)
GRANITE: Final[Values] = {
    "attention_multiplier": lambda m: m.number("attention.scale", m.head_dim**-0.5),
    "embedding_multiplier": lambda m: m.number("embedding_scale", 1.0),
    "residual_multiplier": lambda m: m.number("residual_scale", 1.0),
    "logits_scaling": lambda m: m.number("logit_scale"),
}
GLM4: Final[Values] = {
    "rope_traditional": lambda _: True,
    # Only those of GLM-4.1V and GLM-4.6V have some.
    "mrope_section": lambda m: [int(size) for size in m.numbers("rope.dimension_sections")],
}
LATENT: Final[Values] = {
    "kv_lora_rank": lambda m: m.integer("attention.kv_lora_rank"),
    "q_lora_rank": lambda m: m.integer("attention.q_lora_rank", 0) or None,
    "qk_rope_head_dim": lambda m: m.integer("rope.dimension_count"),
    "qk_nope_head_dim": lambda m: m.latent_head_dim - m.integer("rope.dimension_count"),
    "v_head_dim": lambda m: m.latent_value_dim,
    "n_routed_experts": lambda m: m.integer("expert_count", 0) or None,
    "n_shared_experts": lambda m: m.integer("expert_shared_count", 0) or None,
    "num_experts_per_tok": lambda m: m.integer("expert_used_count", 0),
    "moe_intermediate_size": lambda m: m.integer("expert_feed_forward_length"),
    "first_k_dense_replace": lambda m: m.integer("leading_dense_block_count", 0),
    "routed_scaling_factor": lambda m: m.number("expert_weights_scale", 1.0),
    "norm_topk_prob": lambda m: bool(m.number("expert_weights_norm", False)),
    "n_group": lambda m: m.integer("expert_group_count", 1),
    "topk_group": lambda m: m.integer("expert_group_used_count", 1),
    "num_key_value_heads": lambda m: m.num_heads,
    "model_type": lambda m: _latent_model_type(m),
    "topk_method": lambda m: (
        "noaux_tc"
        if _has_sigmoid_gate(m)
        else "group_limited_greedy"
        if m.integer("expert_group_count", 1) > 1
        else "greedy"
    ),
}
