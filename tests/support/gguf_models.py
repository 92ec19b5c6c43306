"""Small models with random weights, and what a GGUF file of them holds."""

from collections.abc import Iterator
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from mlx_lm.models import llama, qwen2, qwen3
from numpy.typing import NDArray

from batching.backend.gguf.model import GgufOutline, evaluate
from batching.model_files.gguf_header import GgufHeader
from tests.support.arrays import parameters
from tests.support.gguf_writer import RawTensor, Value

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


def load_gguf(
    header: GgufHeader, dtype: mx.Dtype | None, *, has_kernels: bool = False
) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model of a file, its arrays evaluated, and its config."""
    outline = GgufOutline(header, dtype, has_kernels=has_kernels)
    outline.read_all()
    evaluate(outline.model)
    return outline.model, outline.config


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
    """Return random blocks of a type, and the weights that `gguf` takes them for."""
    rng = np.random.default_rng(seed)
    type_ = GGMLQuantizationType(kind)
    block, block_bytes = GGML_QUANT_SIZES[type_]
    raw = rng.integers(0, 256, (shape[0] * shape[1] // block, block_bytes), np.uint8)
    for start, numbers in _scales(type_, rng, len(raw)):
        raw[:, start : start + numbers.shape[1]] = numbers
    rows = raw.reshape(shape[0], -1)
    return RawTensor(kind, shape, raw.tobytes()), dequantize(rows, type_)


# Where a block has its numbers of float16; the others of type IQ... have one, at the start.
_HALVES_AT: Final = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "IQ1_M": (),
    "MXFP4": (),
    "NVFP4": (),
}


def _scales(
    kind: GGMLQuantizationType, rng: np.random.Generator, count: int
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yield bytes of blocks that may not be just any, and where they are."""
    for start in _HALVES_AT.get(kind.name, (0,)):
        yield start, rng.uniform(0.001, 0.02, (count, 1)).astype(np.float16).view(np.uint8)
    match kind.name:
        case "MXFP4":
            yield 0, rng.integers(115, 130, (count, 1), np.uint8)
        case "NVFP4":
            yield 0, rng.integers(0, 0x7F, (count, 4), np.uint8)
        case "TQ2_0":
            digits = rng.integers(0, 3, (4, count, 64), np.uint8)
            yield 0, digits[0] | digits[1] << 2 | digits[2] << 4 | digits[3] << 6
        case "IQ1_M":
            # Four bits each of the scale are the highest of four words.
            words = rng.integers(0, 1 << 12, (count, 4), np.uint16)
            scale = int(np.float16(0.01).view(np.uint16))
            words |= np.array([(scale >> 4 * i & 15) << 12 for i in range(4)], np.uint16)
            yield 48, words.view(np.uint8)
