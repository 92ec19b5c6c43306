"""Sizes that the configurations of the zoo share: small, and fit for quantization in groups of 32.

A model takes from them the names that it knows.  A prompt of 40 tokens is longer than each
window, chunk and index.
"""

from typing import Any, Final

Config = dict[str, Any]

VOCAB_SIZE: Final = 128
WINDOW: Final = 12

COMMON: Final[Config] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
}

# Two of four experts, by all the names that these sizes have.
EXPERTS: Final[Config] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_intermediate_size": 64,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "shared_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "n_group": 1,
    "topk_group": 1,
    "decoder_sparse_step": 1,
    "moe_layer_freq": 1,
    "mlp_only_layers": [],
}

# One dense layer before the mixtures.
DENSE_FIRST: Final[Config] = {**EXPERTS, "num_hidden_layers": 3, "first_k_dense_replace": 1}

# The heads of latent attention; each size differs from those it could be taken for.
LATENT: Final[Config] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}

SLIDING: Final = "sliding_attention"
FULL: Final = "full_attention"
LINEAR: Final = "linear_attention"


def alternating(*kinds: str, times: int = 2, **sizes: Any) -> Config:
    """Repeat these kinds of layer."""
    return {"layer_types": list(kinds) * times, "num_hidden_layers": len(kinds) * times, **sizes}


def windowed(times: int = 2, **sizes: Any) -> Config:
    return alternating(SLIDING, FULL, times=times, sliding_window=WINDOW, **sizes)


def nested(model_type: str, **sizes: Any) -> Config:
    """Put a language model's sizes where multimodal models have them."""
    text = {**COMMON, "model_type": model_type, **sizes}
    return {"text_config": text, "vocab_size": VOCAB_SIZE}


def gated_delta_net(**sizes: Any) -> Config:
    """Alternate layers of linear attention with layers of full attention."""
    return {
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.25,
        **sizes,
    }
