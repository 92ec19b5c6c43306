"""Models of which transformers has computed log probabilities, and their weights.

Needs neither MLX nor torch: both sides read it.
"""

import zlib
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_COMMON: Final[dict[str, Any]] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
# Configs as they are published; rotations are stretched within the length of the prompt.
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "llama": _COMMON
    | {
        "intermediate_size": 96,
        "max_position_embeddings": 256,
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "gpt_oss": _COMMON
    | {
        "intermediate_size": 96,
        "max_position_embeddings": 256,
        "attention_bias": True,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "swiglu_limit": 7.0,
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
}
TOKENS: Final = [int(token) for token in np.random.default_rng(3).integers(1, 96, 120)]


def weight(name: str, shape: tuple[int, ...]) -> Floats:
    """Make a tensor of a checkpoint; of the experts' gates some are beyond the limit."""
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if "norm" in name:
        values = 1 + 0.3 * values
    elif "experts" in name and len(shape) == 3:
        values *= 4 * shape[1] ** -0.5
    elif len(shape) > 1:
        values *= 1.5 * shape[-1] ** -0.5
    return values.astype(np.float32)
