"""Further shapes of some model types, where checkpoints take another path through the same file."""

from typing import Final

from scripts.make_model.tiny_configs import Config, nested, windowed
from tests.support.zoo.dense import DENSE
from tests.support.zoo.latent import LATENT_MODELS
from tests.support.zoo.recurrent import RECURRENT

VARIANTS: Final[dict[str, Config]] = {
    # mlx-lm serves it by the file of llama.
    "mistral": {**windowed(), "tie_word_embeddings": False},
    # The small ones share keys and values between layers, the large ones have experts.
    "gemma4-shared": {**nested("gemma4_text", **DENSE["gemma4_text"]), "model_type": "gemma4"},
    # The base of its positions depends on how far the context reaches.
    "internlm2-dynamic": {
        "model_type": "internlm2",
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    },
    "deepseek_v3-direct": {
        **LATENT_MODELS["deepseek_v3"],
        "model_type": "deepseek_v3",
        "q_lora_rank": None,
    },
    "granitemoehybrid-dense": {
        **RECURRENT["granitemoehybrid"],
        "model_type": "granitemoehybrid",
        "num_local_experts": 0,
        "position_embedding_type": "nope",
    },
    "kimi_linear-nope": {
        **RECURRENT["kimi_linear"],
        "model_type": "kimi_linear",
        "mla_use_nope": True,
    },
    "nemotron_h-latent": {
        **RECURRENT["nemotron_h"],
        "model_type": "nemotron_h",
        "moe_latent_size": 64,
    },
}
