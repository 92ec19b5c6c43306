"""Models of the llama, qwen2 and qwen3 families from GGUF files.

The file's tensors get mlx-lm's names, its metadata becomes mlx-lm's config, and mlx-lm's own
model runs them.  Two things differ from a Hugging Face checkpoint:

- the rows of q and k are permuted in llama files, which is what `rope_traditional` undoes;
- llama 3's rope scaling is a tensor of factors, `rope_freqs.weight`, in place of parameters.
"""

import importlib
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import Llama3RoPE

from batching.backend.gguf.header import GgufHeader
from batching.backend.gguf.q4_k import read_q4_k

Config = dict[str, Any]  # config.json's contents: mlx-lm takes any JSON
Weights = dict[str, mx.array]

FAMILIES: Final = ("llama", "qwen2", "qwen3")
_GROUP_SIZE: Final = 32
# Of dequantizing; each works on one tensor, in memory of its own.
_MAX_STREAMS: Final = 8
_ROPE_FACTORS: Final = "rope_freqs.weight"
# Bits that a weight takes as it is loaded; of a scale and a bias, 16 bits each, for 32 weights.
_QUANTIZED_BITS: Final = {"Q4_0": 5, "Q4_1": 5, "Q4_K": 5, "Q8_0": 9}
_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_gguf(header: GgufHeader, dtype: mx.Dtype | None) -> tuple[nn.Module, Config]:
    """Load the model of a file whose header was read, its arrays evaluated.

    With a `dtype` every weight is dequantized to it.  Without, quantized weights stay, and the
    float ones become float16 like their scales: a float32 norm would turn all activations into
    float32.  A file of float32 only stays float32.
    """
    config = read_config(header)
    arrays = _read_arrays(header)
    rope_factors = arrays.pop(_ROPE_FACTORS, None)
    weights = {rename(header, name): array for name, array in arrays.items()}
    del arrays
    _add_missing_bias(weights, config)
    model = _build(config)
    _load_weights(header, model, _convert(weights, dtype))
    if rope_factors is not None:
        _set_rope_factors(header, model, config, rope_factors)
    evaluate(model)
    return model, config


def num_bytes(header: GgufHeader, dtype: mx.Dtype | None) -> int:
    """Return the memory that the weights take once they are loaded."""
    tensors = header.tensors.values()
    is_half = any(tensor.type_name != "F32" for tensor in tensors)
    bits = {} if dtype else _QUANTIZED_BITS
    others = 8 * dtype.size if dtype else 16 if is_half else 32
    return sum(math.prod(t.shape) * bits.get(t.type_name, others) for t in tensors) // 8


def _read_arrays(header: GgufHeader) -> Weights:
    arrays = mx.load(str(header.path))
    assert isinstance(arrays, dict)
    for name, tensor in header.tensors.items():
        if tensor.type_name == "Q4_K":
            arrays |= read_q4_k(header, name)
    return arrays


def evaluate(model: nn.Module) -> None:
    """Compute every array that the model holds."""
    model.eval()
    mx.eval(arrays_of(model))


def arrays_of(model: nn.Module) -> list[mx.array]:
    """Return every array that a model holds, once, also private ones like rope's frequencies."""
    arrays = [
        value
        for module in _modules(model)
        for value in module.values()
        if isinstance(value, mx.array)
    ]
    return list({id(array): array for array in arrays}.values())


def _modules(model: nn.Module) -> list[nn.Module]:
    return list(model.modules())


def read_config(header: GgufHeader) -> Config:
    """Build mlx-lm's config of the model, or refuse what mlx-lm would compute differently."""
    family = header.text("general.architecture", "none")
    if family not in FAMILIES:
        raise header.refuse(
            f"architecture {family} (supported as GGUF: {', '.join(FAMILIES)}; "
            "other models as MLX or Hugging Face directory)"
        )
    hidden_size = header.integer(f"{family}.embedding_length")
    num_heads = header.integer(f"{family}.attention.head_count")
    head_dim = header.integer(f"{family}.attention.key_length", hidden_size // num_heads)
    _reject_unsupported(header, family, head_dim, hidden_size // num_heads)
    if not (embedding := header.tensors.get("token_embd.weight")):
        raise header.refuse("it has no tensor token_embd.weight")
    if (num_layers := header.integer(f"{family}.block_count")) > len(header.tensors):
        raise header.refuse(f"it has {len(header.tensors)} tensors for {num_layers} layers")
    biases = [name for name in header.tensors if name.endswith(".bias")]
    return {
        "model_type": family,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "intermediate_size": header.integer(f"{family}.feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": header.integer(f"{family}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": header.number(f"{family}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": header.integer(f"{family}.context_length"),
        "rope_theta": header.number(f"{family}.rope.freq_base", 10000.0),
        "rope_traditional": family == "llama",
        "rope_scaling": _rope_scaling(header, family),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": any(".attn_" in name for name in biases),
        "mlp_bias": any(".ffn_" in name for name in biases),
    }


def _reject_unsupported(header: GgufHeader, family: str, head_dim: int, usual: int) -> None:
    refused = {
        "a part of a split file; join the parts first": header.integer("split.count", 1) > 1,
        "mixture of experts": header.integer(f"{family}.expert_count", 0) > 0,
        "heads whose keys and values differ in size": head_dim
        != header.integer(f"{family}.attention.value_length", head_dim),
        "rotary embedding of a part of the head": head_dim
        != header.integer(f"{family}.rope.dimension_count", head_dim),
        # mlx-lm's qwen2 has no head_dim of its own.
        f"a head size of {head_dim} in {family}": family == "qwen2" and head_dim != usual,
    }
    for reason, applies in refused.items():
        if applies:
            raise header.refuse(reason)


def _rope_scaling(header: GgufHeader, family: str) -> Config | None:
    prefix = f"{family}.rope.scaling"
    kind = header.text(f"{prefix}.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn") or header.number(f"{prefix}.attn_factor", 1.0) != 1.0:
        raise header.refuse(f"rope scaling {kind} with its parameters is not supported")
    scaling: Config = {"type": kind, "factor": header.number(f"{prefix}.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = header.integer(
            f"{prefix}.original_context_length", header.integer(f"{family}.context_length")
        )
    return scaling


def rename(header: GgufHeader, name: str) -> str:
    """Return mlx-lm's name of a tensor: `blk.0.attn_q.weight` is q_proj's of layer 0."""
    module, _, kind = name.rpartition(".")
    if module in _NAMES:
        return f"{_NAMES[module]}.{kind}"
    match module.split("."):
        case ["blk", layer, part] if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    raise header.refuse(f"unknown tensor {name}")


def _add_missing_bias(weights: Weights, config: Config) -> None:
    """Give o_proj a bias of zero where only q, k and v have one: mlx-lm's llama has all or none."""
    if config["model_type"] != "llama" or not config["attention_bias"]:
        return
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}.self_attn.o_proj.bias"
        weights.setdefault(name, mx.zeros(config["hidden_size"]))


def _build(config: Config) -> nn.Module:
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    assert isinstance(model, nn.Module)
    return model


def _convert(weights: Weights, dtype: mx.Dtype | None) -> Weights:
    """Bring all weights to one float type; empties `weights` so that both need not fit."""
    quantized = {name.removesuffix(".scales") for name in weights if name.endswith(".scales")}
    keeps_quantized = dtype is None
    if dtype is None:
        is_half = any(array.dtype == mx.float16 for array in weights.values())
        dtype = mx.float16 if is_half else mx.float32
    converted: Weights = {}
    if not keeps_quantized:
        for names in _several_at_once(sorted(f"{module}.weight" for module in quantized)):
            for name, stream in names:
                with mx.stream(stream):
                    module = name.removesuffix(".weight")
                    converted[name] = _dequantize(weights, module).astype(dtype)
            mx.eval([converted[name] for name, _ in names])
    for name in list(weights):
        array = weights.pop(name)
        converted[name] = array if array.dtype == mx.uint32 else array.astype(dtype)
    return converted


def _several_at_once(names: Sequence[str]) -> Iterator[list[tuple[str, mx.Stream]]]:
    """Yield as many names as there are cores, each with a stream: one stream uses one core."""
    if mx.default_device() != mx.cpu:
        yield [(name, mx.default_stream(mx.default_device())) for name in names]
        return
    streams = [
        mx.new_stream(mx.Device(mx.cpu)) for _ in range(min(os.cpu_count() or 1, _MAX_STREAMS))
    ]
    for start in range(0, len(names), len(streams)):
        yield list(zip(names[start:], streams, strict=False))


def _dequantize(weights: Weights, module: str) -> mx.array:
    """Dequantize in the scales' float16, as mlx-lm does.

    The rounding is part of the weights that others got from such a file, and the golden answers
    were made with it.
    """
    weight, scales, biases = (
        weights.pop(f"{module}.{part}") for part in ("weight", "scales", "biases")
    )
    return mx.dequantize(weight, scales, biases, group_size=_GROUP_SIZE, bits=_bits(weight, scales))


def _bits(weight: mx.array, scales: mx.array) -> int:
    """Return the bits of one weight: a row of words, 32 bits each, has one scale in 32 weights."""
    return weight.shape[-1] // scales.shape[-1]


def _load_weights(header: GgufHeader, model: nn.Module, weights: Weights) -> None:
    quantized = [name.removesuffix(".scales") for name in weights if name.endswith(".scales")]
    bits = {path: _bits(weights[f"{path}.weight"], weights[f"{path}.scales"]) for path in quantized}

    def quantization(path: str, module: nn.Module) -> bool | dict[str, int]:
        return {"group_size": _GROUP_SIZE, "bits": bits[path]} if path in bits else False

    if bits:
        nn.quantize(model, class_predicate=quantization)
    try:
        model.load_weights(list(weights.items()), strict=True)
    except ValueError as error:
        raise header.refuse(f"tensors and metadata disagree: {error}") from error


def _set_rope_factors(
    header: GgufHeader, model: nn.Module, config: Config, factors: mx.array
) -> None:
    """Divide the rope frequencies by the file's factors."""
    dims = config["head_dim"]
    if config["rope_scaling"] is not None or factors.shape != (dims // 2,):
        raise header.refuse(f"{_ROPE_FACTORS} of shape {factors.shape} with other rope scaling")
    base = config["rope_theta"] ** (mx.arange(0, dims, 2, dtype=mx.float32) / dims)
    for module in _modules(model):
        if isinstance(getattr(module, "rope", None), nn.RoPE):
            rope = Llama3RoPE(
                dims,
                traditional=config["rope_traditional"],
                base=config["rope_theta"],
                scaling_config={"factor": 1.0},
            )
            rope._freqs = base * factors.astype(mx.float32)
            module.rope = rope
