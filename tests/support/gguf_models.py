"""Small models with random weights, and what a GGUF file of them holds."""

from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import llama, qwen2, qwen3
from numpy.typing import NDArray

from tests.support.arrays import parameters
from tests.support.gguf_writer import Q4_0, Q4_1, Q4_K, Q8_0, RawTensor, Value

Array = NDArray[np.float32]
Metadata = dict[str, Value]
Tensors = dict[str, RawTensor | Array]

_MLX_TO_GGUF: Final = {
    "model.embed_tokens.": "token_embd.",
    "model.norm.": "output_norm.",
    "lm_head.": "output.",
    "model.layers.": "blk.",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_CONFIG: Final[dict[str, Any]] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 80,
    "max_position_embeddings": 256,
    "rope_theta": 5000.0,
    "tie_word_embeddings": True,
}

BYTES = [chr(c) for c in [*range(33, 127), *range(161, 173), *range(174, 256)]]
BYTES += [chr(256 + n) for n in range(256 - len(BYTES))]
# A tokenizer of every byte, two merges and four special tokens.
BPE: Final[Metadata] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": [*BYTES, "12", "Ġa", "<|im_start|>", "<|im_end|>", "<s>", "<tool>"],
    "tokenizer.ggml.token_type": [*[1] * 258, 3, 3, 3, 4],
    "tokenizer.ggml.merges": ["1 2", "Ġ a"],
    "tokenizer.ggml.bos_token_id": 260,
    "tokenizer.ggml.eos_token_id": 259,
}


def random_model(family: str, **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Build mlx-lm's model of a Hugging Face checkpoint: q and k not permuted."""
    mx.random.seed(7)
    config = _CONFIG | {"model_type": family} | changes
    module: Any = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3}[family]
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    for _, child in model.named_modules():
        if isinstance(child, nn.RMSNorm):
            child.weight = mx.random.uniform(0.5, 1.5, child.weight.shape)
    return model, config


def metadata_of(config: dict[str, Any]) -> Metadata:
    family = config["model_type"]
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return {
        "general.architecture": family,
        f"{family}.embedding_length": config["hidden_size"],
        f"{family}.block_count": config["num_hidden_layers"],
        f"{family}.feed_forward_length": config["intermediate_size"],
        f"{family}.attention.head_count": config["num_attention_heads"],
        f"{family}.attention.head_count_kv": config["num_key_value_heads"],
        f"{family}.attention.key_length": head_dim,
        f"{family}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{family}.context_length": config["max_position_embeddings"],
        f"{family}.rope.freq_base": config["rope_theta"],
    }


def tensors_of(model: nn.Module, config: dict[str, Any]) -> Tensors:
    """Name and permute the weights as llama.cpp's converter does."""
    tensors: Tensors = {}
    for name, array in parameters(model).items():
        value: Array = np.array(array.astype(mx.float32))
        if config["model_type"] == "llama" and (".q_proj." in name or ".k_proj." in name):
            is_q = ".q_proj." in name
            value = _permuted(value, config[f"num_{'attention' if is_q else 'key_value'}_heads"])
        for part, gguf in _MLX_TO_GGUF.items():
            name = name.replace(part, gguf)
        tensors[name] = value
    return tensors


def _permuted(value: Array, num_heads: int) -> Array:
    halves = value.reshape(num_heads, 2, value.shape[0] // num_heads // 2, *value.shape[1:])
    swapped: Array = halves.swapaxes(1, 2).reshape(value.shape)
    return swapped


def blocks(kind: int, shape: tuple[int, int], seed: int) -> tuple[RawTensor, Array]:
    """Return random blocks of a type, and the weights they stand for by ggml's definition."""
    size = 256 if kind == Q4_K else 32
    makers = {Q4_0: _q4_0, Q4_1: _q4_1, Q8_0: _q8_0, Q4_K: _q4_k}
    rng = np.random.default_rng(seed)
    pairs = [makers[kind](rng) for _ in range(shape[0] * shape[1] // size)]
    weights = np.concatenate([weights for _, weights in pairs]).reshape(shape)
    return RawTensor(kind, shape, b"".join(raw for raw, _ in pairs)), weights.astype(np.float32)


def _halves(low_and_high: NDArray[np.int64]) -> bytes:
    return bytes(
        int(low) | int(high) << 4 for low, high in zip(*np.split(low_and_high, 2), strict=True)
    )


def _scale(rng: np.random.Generator) -> np.float16:
    return np.float16(rng.uniform(0.01, 0.02))


def _q4_0(rng: np.random.Generator) -> tuple[bytes, Array]:
    d, q = _scale(rng), rng.integers(0, 16, 32)
    return d.tobytes() + _halves(q), np.float32(d) * (q - 8)


def _q4_1(rng: np.random.Generator) -> tuple[bytes, Array]:
    d, m, q = _scale(rng), _scale(rng), rng.integers(0, 16, 32)
    return d.tobytes() + m.tobytes() + _halves(q), np.float32(d) * q + np.float32(m)


def _q8_0(rng: np.random.Generator) -> tuple[bytes, Array]:
    d, q = _scale(rng), rng.integers(-128, 128, 32)
    return d.tobytes() + q.astype(np.int8).tobytes(), np.float32(d) * q


def _q4_k(rng: np.random.Generator) -> tuple[bytes, Array]:
    d, m, q = _scale(rng), _scale(rng), rng.integers(0, 16, (8, 32))
    scales, minima = rng.integers(0, 64, 8), rng.integers(0, 64, 8)
    packed = [int(scales[j] | scales[j + 4] >> 4 << 6) for j in range(4)]
    packed += [int(minima[j] | minima[j + 4] >> 4 << 6) for j in range(4)]
    packed += [int(scales[j] & 15 | (minima[j] & 15) << 4) for j in range(4, 8)]
    pairs = b"".join(_halves(q[j : j + 2].ravel()) for j in range(0, 8, 2))
    weights = np.float32(d) * scales[:, None] * q - np.float32(m) * minima[:, None]
    return d.tobytes() + m.tobytes() + bytes(packed) + pairs, weights.ravel()
