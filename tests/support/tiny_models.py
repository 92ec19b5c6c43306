"""Models of mlx-lm with a few random weights, one of each family."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

from batching.backend.self_check.checked_model import CheckedModel

# Takes a model, the size of its vocabulary, and perhaps the dtype of its keys and values.
Check = Callable[..., CheckedModel]

VOCAB_SIZE: Final = 101
# Of pools, as parameters of the fixture `device_kind`.
DEVICE_KINDS: Final = (
    "on any device",
    "with native kernels",
    "with a GPU's kernels",
)

_COMMON: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}

FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "llama": {"tie_word_embeddings": True},
    # Mistral is served by the llama module; some of its layers see a window only.
    "mistral": {
        "module": "llama",
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "phi3": {},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma3_text": {
        "sliding_window": 6,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 8,
        "rope_local_base_freq": 10000.0,
    },
    # Attention sinks, windows and experts together.
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "rope_scaling": None,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    # Soft caps on the scores.
    "gemma2": {"query_pre_attn_scalar": 8.0, "attn_logit_softcapping": 2.0},
    # Keys that the model's own code changes, and a recurrent state.
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5},
    "mamba": {
        "conv_kernel": 4,
        "state_size": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 2,
    },
}


def tiny_model(family: str, **changes: Any) -> nn.Module:
    """Build a model with random weights, in float32."""
    specific = FAMILIES[family] | changes
    module = import_module(f"mlx_lm.models.{specific.pop('module', family)}")
    config = {"model_type": family, **_COMMON, **specific}
    mx.random.seed(7)
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.float32)
    # Normal initial weights make answers that hardly differ from token to token.
    model.apply(lambda weight: weight * 3 if weight.ndim > 1 else weight)
    model.eval()
    mx.eval(model.parameters())
    return model


def insist_on_own_caches(model: nn.Module) -> None:
    """Plant a fault: the model is right on caches of mlx-lm's own types only."""
    plain = type(model)

    def call(self: nn.Module, token_ids: mx.array, cache: Any = None) -> mx.array:
        logits: mx.array = plain.__call__(self, token_ids, cache=cache)
        is_own = cache is None or type(cache[0]).__name__ in ("KVCache", "ArraysCache")
        return logits if is_own else logits[..., ::-1]

    model.__class__ = type(plain.__name__, (plain,), {"__call__": call})
