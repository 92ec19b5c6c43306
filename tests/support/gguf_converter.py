"""Small models with random weights, written as llama.cpp's converter writes them.

Names and keys come from the `gguf` package, not from the tables under test.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np

from batching.backend.yarn import leave_untruncated
from tests.support.arrays import parameters
from tests.support.gguf_architectures import Array, Config, Tiny
from tests.support.gguf_models import BPE

Quantize = Callable[[str, Array], gguf.GGMLQuantizationType]

VOCAB_SIZE: Final = 96
_COMMON: Final[Config] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 5000.0,
    "tie_word_embeddings": False,
}
# Methods of gguf.GGUFWriter without `add_`, and the config's value that each writes.
SETTINGS: Final[dict[str, Any]] = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads",
    "key_length": "head_dim",
    "value_length": "head_dim",
    "layer_norm_rms_eps": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "rope_freq_base": "rope_theta",
}


def random_model(tiny: Tiny, **changes: Any) -> tuple[nn.Module, Config]:
    """Build mlx-lm's model with weights, norms and biases that are all random."""
    mx.random.seed(7)
    config = _COMMON | tiny.config | changes | {"model_type": tiny.model_type}
    module = import_module(f"mlx_lm.models.{tiny.model_type}")
    model: nn.Module = module.Model(module.ModelArgs.from_dict(dict(config)))
    arrays = {
        name: mx.random.uniform(0.5, 1.5, array.shape) if array.ndim == 1 else 2 * array
        for name, array in parameters(model).items()
    }
    if config["tie_word_embeddings"]:
        arrays.pop("lm_head.weight", None)
    # As gemma3_text finds out that its head is the embedding.
    arrays = model.sanitize(arrays) if tiny.model_type == "gemma3_text" else arrays
    model.load_weights(list(arrays.items()))
    leave_untruncated(model, config)
    model.eval()
    return model, config


def write_model(
    path: Path,
    tiny: Tiny,
    model: nn.Module,
    config: Config,
    quantize: Quantize = lambda *_: gguf.GGMLQuantizationType.F32,
    *,
    joins_gates: bool = False,
) -> Path:
    """Write a model with names, values and tensors as llama.cpp's converter does."""
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[tiny.arch])
    _add_tokenizer(writer)
    writer.add_vocab_size(config["vocab_size"])
    for method, value in (SETTINGS | tiny.settings).items():
        add = getattr(writer, f"add_{method}")
        add(config[value] if isinstance(value, str) else value(config))
    names = gguf.get_tensor_name_map(tiny.arch, config["num_hidden_layers"])
    tensors: dict[str, Array] = {}
    for name, array in parameters(model).items():
        value = np.array(array.astype(mx.float32))
        for tensor, content in _converted(tiny, config, name, value):
            tensors[tensor_name(names, tensor)] = content
    for name in [name for name in tensors if joins_gates and "ffn_gate_exps" in name]:
        both = [tensors.pop(name), tensors.pop(name.replace("gate", "up"))]
        tensors[name.replace("gate", "gate_up")] = np.concatenate(both, axis=1)
    for name, value in tensors.items():
        _add(writer, name, value, quantize)
    for length in ("long", "short"):
        if factors := (config.get("rope_scaling") or {}).get(f"{length}_factor"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    values: dict[str, Any] = {key.removeprefix("tokenizer.ggml."): BPE[key] for key in BPE}
    writer.add_tokenizer_model(values["model"])
    writer.add_tokenizer_pre(values["pre"])
    writer.add_token_list(values["tokens"])
    writer.add_token_types(values["token_type"])
    writer.add_token_merges(values["merges"])
    writer.add_eos_token_id(values["eos_token_id"])


def tensor_name(names: gguf.TensorNameMap, tensor: str) -> str:
    found = (
        names.get_name(name, try_suffixes=(".weight", ".bias"))
        for name in (tensor, tensor.removeprefix("model."))
    )
    return next(name for name in found if name is not None)


def _add(writer: gguf.GGUFWriter, name: str, value: Array, quantize: Quantize) -> None:
    kind = quantize(name, value)
    stored = gguf.quants.quantize(np.ascontiguousarray(value), kind)
    writer.add_tensor(name, stored, raw_dtype=kind)


def _converted(tiny: Tiny, config: Config, name: str, value: Array) -> list[tuple[str, Array]]:
    for part, other in tiny.renames.items():
        name = name.replace(part, other)
    if name.endswith("in_proj_qkvz.weight"):
        return _of_qkvz(name, value, config)
    if name.endswith("kv_b_proj.weight"):
        return _of_latent(name, value, config)
    for end, change in tiny.changes.items():
        if name.endswith((end, f"{end}.weight", f"{end}.bias")):
            value = change(value, config)
    return [(name, value)]


def _of_qkvz(name: str, value: Array, config: Config) -> list[tuple[str, Array]]:
    """Take q, k, v and z of each key head apart, into q, k and v of all heads, and z of all."""
    keys, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    heads = value.reshape(keys, -1, value.shape[-1])
    v_dim = (heads.shape[1] - 2 * key_dim) // 2
    *qkv, z = (
        part.reshape(-1, value.shape[-1])
        for part in np.split(heads, [key_dim, 2 * key_dim, 2 * key_dim + v_dim], axis=1)
    )
    return [
        (name.replace("qkvz", "qkv"), np.concatenate(qkv)),
        (name.replace("qkvz", "z"), z),
    ]


def _of_latent(name: str, value: Array, config: Config) -> list[tuple[str, Array]]:
    """Take keys and values of each head apart, and transpose those of the keys."""
    heads = value.reshape(config["num_attention_heads"], -1, value.shape[-1])
    keys, values = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
    return [
        (name.replace("kv_b", "k_b"), keys.swapaxes(1, 2)),
        (name.replace("kv_b", "v_b"), values),
    ]
