"""Published configurations, and what a GGUF file says of each."""

from dataclasses import dataclass, field, replace
from typing import Any, Final

from tests.support.gguf_architectures import TINY, VARIANTS, Config, Tiny


@dataclass(frozen=True, slots=True)
class Shape:
    """A configuration as the model's publisher has it.

    form: how llama.cpp's converter writes such a model; of that, only names and values are used.
    quantization, of_experts: of matrices, and of those of experts, unless the caller chooses.
    """

    form: Tiny
    config: Config
    quantization: str = "q4_0"
    of_experts: str = "q4_0"
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def full_config(self) -> Config:
        return {"model_type": self.form.model_type, "torch_dtype": "bfloat16"} | self.config

    @property
    def least_layers(self) -> int:
        """Return the layers until each kind of layer has occurred, which mlx-lm counts on."""
        keys = ("full_attention_interval", "sliding_window_pattern")
        kinds: list[str] = self.config.get("layer_types", [""])
        counts: list[int] = [self.config.get(key, 1) for key in keys]
        return max(*counts, *(1 + kinds.index(kind) for kind in kinds))

    def with_layers(self, count: int) -> "Shape":
        cut = {"num_hidden_layers": count}
        if kinds := self.config.get("layer_types"):
            cut["layer_types"] = kinds[:count]
        return replace(self, config=self.config | cut)


def _config(
    architecture: str,
    sizes: tuple[int, int, int],
    heads: tuple[int, int, int],
    vocab_size: int,
    **values: Any,
) -> Config:
    """Return a config of layers, width and MLP, and of query heads, key heads and their size."""
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        **dict(zip(("num_hidden_layers", "hidden_size", "intermediate_size"), sizes, strict=True)),
        **dict(zip(("num_attention_heads", "num_key_value_heads", "head_dim"), heads, strict=True)),
        "vocab_size": vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
        "attention_bias": False,
        **values,
    }


def _experts(count: int, active: int, width: int) -> Config:
    return {
        "num_experts": count,
        "num_experts_per_tok": active,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    }


_GPT_OSS: Final[Config] = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}
_QWEN3_5: Final[Config] = {
    "max_position_embeddings": 262144,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "rope_theta": 1e7,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
    },
}
_GEMMA3: Final[Config] = {
    "max_position_embeddings": 131072,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "hidden_activation": "gelu_pytorch_tanh",
}
_LLAMA3: Final[Config] = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}

SHAPES: Final[dict[str, Shape]] = {
    "qwen3-1.7b": Shape(TINY["qwen3"], _config("Qwen3", (28, 2048, 6144), (16, 8, 128), 151936)),
    "qwen3-4b": Shape(TINY["qwen3"], _config("Qwen3", (36, 2560, 9728), (32, 8, 128), 151936)),
    "qwen3-30b-a3b": Shape(
        TINY["qwen3moe"],
        _config("Qwen3Moe", (48, 2048, 6144), (32, 4, 128), 151936, **_experts(128, 8, 768)),
    ),
    "gpt-oss-20b": Shape(
        TINY["gpt-oss"],
        _config("GptOss", (24, 2880, 2880), (64, 8, 64), 201088, **_GPT_OSS),
        quantization="q8_0",
        of_experts="mxfp4",
    ),
    "qwen3.5-4b": Shape(
        TINY["qwen35"],
        _config("Qwen3_5", (32, 2560, 9216), (16, 4, 256), 248320, **_QWEN3_5),
        settings={"rope_dimension_sections": lambda c: [*c["rope_parameters"]["mrope_section"], 0]},
    ),
    "gemma-3-4b": Shape(
        VARIANTS["gemma3 of long contexts"],
        _config("Gemma3", (34, 2560, 10240), (8, 4, 256), 262208, **_GEMMA3),
    ),
    "llama-3.2-3b": Shape(
        TINY["llama"], _config("Llama", (28, 3072, 8192), (24, 8, 128), 128256, **_LLAMA3)
    ),
    "mixture": Shape(
        TINY["qwen3moe"],
        _config("Qwen3Moe", (12, 1024, 2048), (16, 4, 64), 49152, **_experts(32, 4, 512)),
    ),
}
