"""Writes a shape's model: a GGUF file as llama.cpp's converter does, or a directory as mlx-lm does."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import gguf
import mlx.core as mx
import numpy as np
from mlx_lm.models.rope_utils import Llama3RoPE

from batching.backend.gguf.tokenizer import build_tokenizer
from batching.backend.loader import BUNDLED_MODEL, resolve
from batching.model_files.gguf_header import GgufHeader, read_header
from scripts.make_model import k_types
from scripts.make_model.shapes import Shape
from scripts.make_model.weights import BLOCK, floats, ggml_type, matrix, mlx_parts, num_bytes
from tests.support.arrays import parameters
from tests.support.gguf_converter import SETTINGS, tensor_name

_TOKENIZER: Final = "tokenizer."
_NORMAL_TOKEN: Final = 1
_ROUTERS: Final = ("mlp.gate.weight", "mlp.router.weight")
_SEED: Final = 7


def tensors_of(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return mlx-lm's names and shapes of all arrays; none of them is computed."""
    config = shape.full_config
    module = import_module(f"mlx_lm.models.{shape.form.model_type}")
    model = module.Model(module.ModelArgs.from_dict(json.loads(json.dumps(config))))
    return {
        name: array.shape
        for name, array in parameters(model).items()
        if not (config["tie_word_embeddings"] and name == "lm_head.weight")
    }


def quantization_of(shape: Shape, name: str, sizes: tuple[int, ...]) -> str | None:
    """Return how a tensor is stored; None is float32."""
    is_matrix = len(sizes) > 1 and name.endswith(".weight") and "conv1d" not in name
    if not is_matrix or name.endswith(_ROUTERS) or sizes[-1] % BLOCK:
        return None
    kind = shape.of_experts if len(sizes) > 2 else shape.quantization
    if kind != k_types.MIX:
        return kind
    is_tied = shape.config["tie_word_embeddings"]
    return k_types.type_in_mix(name, shape.config["num_hidden_layers"], sizes[-1], is_tied=is_tied)


def size_of(shape: Shape) -> int:
    """Return the bytes of all weights."""
    kinds = ((quantization_of(shape, *tensor), tensor[1]) for tensor in tensors_of(shape).items())
    return sum(num_bytes(kind or "f32", sizes) for kind, sizes in kinds)


def write_gguf(shape: Shape, path: Path) -> None:
    """Write a file piece by piece."""
    config, rng = shape.full_config, np.random.default_rng(_SEED)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[shape.form.arch])
    writer.add_name(path.stem)
    for method, value in (SETTINGS | shape.form.settings | shape.settings).items():
        getattr(writer, f"add_{method}")(config[value] if isinstance(value, str) else value(config))
    _add_tokenizer(writer, padded_vocabulary(config["vocab_size"]).metadata)
    tensors = dict(_gguf_tensors(shape, rng))
    for name, (kind, sizes, _) in tensors.items():
        size = num_bytes(kind, sizes)
        writer.add_tensor_info(name, sizes, np.dtype(np.float32), size, ggml_type(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    (file,) = writer.fout
    writer.write_padding(file, file.tell())
    for kind, sizes, pieces in tensors.values():
        for piece in pieces:
            piece.tofile(file)
        writer.write_padding(file, num_bytes(kind, sizes))
    writer.close()


def _gguf_tensors(
    shape: Shape, rng: np.random.Generator
) -> Iterator[tuple[str, tuple[str, tuple[int, ...], Iterator[Any]]]]:
    """Yield names, types, shapes and contents; a content is made when it is asked for."""
    names = gguf.get_tensor_name_map(shape.form.arch, shape.config["num_hidden_layers"])
    for name, sizes in tensors_of(shape).items():
        renamed = name
        for part, other in shape.form.renames.items():
            renamed = renamed.replace(part, other)
        if (kind := quantization_of(shape, name, sizes)) is not None:
            content = matrix(kind, name, sizes, rng)
            yield tensor_name(names, renamed), (kind, sizes, content)
            continue
        value = floats(name, sizes, rng)
        if name.endswith("conv1d.weight"):
            value = value[..., 0]
        if name.endswith("A_log"):
            value = -np.exp(value)
        yield tensor_name(names, renamed), ("f32", value.shape, iter([value]))
    if (factors := _llama3_factors(shape.config)) is not None:
        yield "rope_freqs.weight", ("f32", factors.shape, iter([factors]))


def _llama3_factors(config: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") != "llama3":
        return None
    size, base = config["head_dim"], config["rope_theta"]
    scaled = Llama3RoPE(size, base=base, scaling_config=scaling)._freqs
    plain = base ** (mx.arange(0, size, 2, dtype=mx.float32) / size)
    return np.array(scaled / plain)


@cache
def padded_vocabulary(size: int) -> GgufHeader:
    """Return the bundled model's header with further tokens, which have texts: all are counted."""
    header = read_header(resolve(BUNDLED_MODEL))
    tokens, types = (f"{_TOKENIZER}ggml.{name}" for name in ("tokens", "token_type"))
    known = header.strings(tokens)
    more = range(len(known), size)
    padded: dict[str, Any] = {
        tokens: [*known, *(f"<unused{index}>" for index in more)],
        types: [*map(int, header.numbers(types)), *(_NORMAL_TOKEN for _ in more)],
    }
    return replace(header, metadata=header.metadata | padded)


def _add_tokenizer(writer: gguf.GGUFWriter, metadata: Mapping[str, Any]) -> None:
    for key, value in metadata.items():
        if key.startswith(_TOKENIZER):
            match value:
                case bool():
                    writer.add_bool(key, value)
                case int():
                    writer.add_uint32(key, value)
                case str():
                    writer.add_string(key, value)
                case _:
                    writer.add_array(key, value)


def write_directory(shape: Shape, path: Path) -> None:
    """Write config, tokenizer and weights, a file for each layer."""
    path.mkdir(parents=True)
    config = shape.full_config
    if shape.quantization != "bf16":
        # mlx-lm finds out of each tensor how it is quantized.
        config |= {"quantization": {"group_size": BLOCK, "bits": 4}}
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    # `Any` because the wrapper hands everything on to the tokenizer.
    tokenizer: Any = build_tokenizer(padded_vocabulary(config["vocab_size"]))
    tokenizer.save_pretrained(path)
    rng = np.random.default_rng(_SEED)
    groups: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, sizes in tensors_of(shape).items():
        layer = name.partition("layers.")[2].partition(".")[0] or "others"
        groups.setdefault(layer, {})[name] = sizes
    for group, tensors in groups.items():
        arrays: dict[str, mx.array] = {}
        for name, sizes in tensors.items():
            arrays |= _directory_arrays(shape, name, sizes, rng)
        mx.save_safetensors(str(path / f"model-{group}.safetensors"), arrays, {"format": "mlx"})


def _directory_arrays(
    shape: Shape, name: str, sizes: tuple[int, ...], rng: np.random.Generator
) -> dict[str, mx.array]:
    if (kind := quantization_of(shape, name, sizes)) is not None:
        parts = mlx_parts(kind, sizes, matrix(kind, name, sizes, rng))
        return {f"{name.removesuffix('weight')}{part}": array for part, array in parts.items()}
    value = floats(name, sizes, rng)
    if shape.form.model_type == "gemma3_text" and name.endswith("norm.weight"):
        value -= 1
    exact = name.endswith("A_log")
    return {name: mx.array(value) if exact else mx.array(value).astype(mx.bfloat16)}


def size_in_words(num: int) -> str:
    return f"{num / 2**30:.2f} GiB" if num >= 1 << 30 else f"{math.ceil(num / 2**20)} MiB"
