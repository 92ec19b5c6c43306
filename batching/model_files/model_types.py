"""The model types of mlx-lm: their other names, and how tiny models of each are served.

docs/model-types.md says the same; a test compares them.  There are two text models of mlx-vlm beside them.
"""

from collections.abc import Mapping
from typing import Final

# Names of configs that mlx-lm reads by the file of another type.
OTHER_NAMES: Final[Mapping[str, str]] = {
    "mistral": "llama",
    "llava": "mistral3",
    "phi-msft": "phixtral",
    "falcon_mamba": "mamba",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "qwen2_5_vl": "qwen2_vl",
    "minimax_m2": "minimax",
    "iquestcoder": "llama",
    "xverse": "llama",
    "gemma4_unified": "gemma4",
    "deepseek_v41_text": "deepseek_v41",
}
# Types that mlx-lm has under another name, and does not map itself.
RENAMED: Final = {"lfm2_vl": "lfm2-vl"}
# Those whose text model is mlx-vlm's: mlx-lm has none.
TEXT_OF_MLX_VLM: Final = ("glm4v", "glm4v_moe")
# Encoders, which mlx-lm does not have, nor this server in GGUF files.
ENCODER_TYPES: Final = ("bert", "modernbert", "roberta", "xlm-roberta")
# Those whose vision part is served: their log probabilities are tested to be those of the plain pass.  The prompts of
# PaliGemma see ahead as a whole; mllama attends to images across.
VISION_TYPES: Final = (
    "gemma3",
    "gemma4",
    "glm4v",
    "glm4v_moe",
    "idefics3",
    "lfm2_vl",
    "lfm2-vl",
    "llava",
    "mistral3",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "smolvlm",
)
_SERVED: Final[Mapping[str, str]] = {
    "batched": (
        "Klear afm7 afmoe apertus bailing_moe cohere cohere2 dbrx deepseek deepseek_v2 deepseek_v3 "
        "deepseek_v3-direct dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe gemma gemma2 gemma3 "
        "gemma3_text gemma3n gemma4 gemma4-shared gemma4_text glm glm4 glm4_moe glm4_moe_lite gpt2 "
        "gpt_neox gpt_oss gptj granite granitemoe helium hunyuan hunyuan_v1_dense internlm2 internlm3 "
        "iquestloopcoder kimi_k25 kimi_vl laguna lille-130m llama llama4 llama4_text longcat_flash "
        "mellum mimo mimo_v2_flash minicpm minicpm3 minimax ministral3 mistral mistral3 mistral4 "
        "mixtral muse_glimmer nanbeige nanochat nemotron nemotron-nas olmo2 olmo3 olmoe openelm phi "
        "phi3 phimoe phixtral pixtral plamo3 qwen qwen2 qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_vl "
        "qwen3_vl_moe seed_oss smollm3 solar_open spark2_5 starcoder2 step3p5 talkie telechat3 "
        "youtu_llm"
    ),
    "batched, in pieces": (
        "baichuan_m1 bailing_hybrid bailing_moe_linear bailing_moe_v3 deepseek_v32 falcon_h1 gear "
        "glm_moe_dsa granitemoehybrid granitemoehybrid-dense jamba kimi_k3 kimi_linear "
        "kimi_linear-nope lfm2 lfm2-vl lfm2_moe longcat_flash_ngram mamba mamba2 nemotron_h nemotron_h-latent "
        "olmo_hybrid plamo plamo2 prism_hadamard_qwen35 qwen3_5 qwen3_5_moe qwen3_next "
        "recurrent_gemma rwkv7 stablelm"
    ),
    "not tried": ("bitnet muse_spark olmo"),
    "one at a time, on its own caches": ("deepseek_v41 phi3small"),
    "one at a time, on the pool": ("gpt_bigcode"),
    "batched but for its attention": ("internlm2-dynamic minimax_m3_vl"),
}
SERVED: Final[Mapping[str, str]] = {
    name: how for how, names in _SERVED.items() for name in names.split()
}


def module_of(model_type: str) -> str:
    """Return the type by whose file mlx-lm reads a model."""
    return OTHER_NAMES.get(model_type, RENAMED.get(model_type, model_type))


def served_as(*model_types: str | None) -> str | None:
    """Return how models of the first of these types are served that has a text model; None if none has."""
    known = (_served_as(model_type) for model_type in model_types if model_type)
    return next((how for how in known if how), None)


def _served_as(model_type: str) -> str | None:
    return (
        "batched"
        if model_type in (*TEXT_OF_MLX_VLM, *ENCODER_TYPES)
        else SERVED.get(module_of(model_type))
    )
