"""Models from GGUF files.

The file's tensors get mlx-lm's names, its metadata becomes mlx-lm's config, and mlx-lm's own
model runs them.  Two things of llama differ from a Hugging Face checkpoint:

- the rows of q and k are permuted, which is what `rope_traditional` undoes;
- llama 3's rope scaling is a tensor of factors, `rope_freqs.weight`, in place of parameters.
"""

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Final, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import Llama3RoPE

from batching.backend.gguf.architectures import Architecture
from batching.backend.gguf.config import architecture_of, read_config
from batching.backend.gguf.header import GgufHeader
from batching.backend.gguf.metadata import Config
from batching.backend.gguf.quantizations import Format, Weight, read_weight
from batching.backend.gguf.storage import NOT_WEIGHTS, float_type
from batching.backend.yarn import leave_untruncated

Weights = dict[str, Weight]
T = TypeVar("T")

# Of dequantizing; each works on one tensor, in memory of its own.
_MAX_STREAMS: Final = 8
_ROPE_FACTORS: Final = "rope_freqs.weight"
_NAMES: Final = {
    "token_embd": "embed_tokens",
    "token_embd_norm": "embedding_norm",
    "output_norm": "norm",
    "output": "lm_head",
}


def load_gguf(
    header: GgufHeader, dtype: mx.Dtype | None, *, keeps_floats: bool = False
) -> tuple[nn.Module, Config]:
    """Load the model of a file whose header was read, its arrays evaluated.

    With a `dtype` every weight is dequantized to it.  Without, quantized weights stay, and the
    float ones become float16 like their scales: a float32 norm would turn all activations into
    float32.  A file of float32 only stays float32, and one without float16 becomes bfloat16.
    With `keeps_floats`, for kernels whose activations are float32 in any case, each array keeps its
    own type, and scales that are products are float32: nothing is rounded.
    """
    architecture, _ = architecture_of(header)
    config = read_config(header)
    model = _build(config)
    if config["tie_word_embeddings"] and hasattr(model, "tie_word_embeddings"):
        # gemma3_text does not look into its config.
        model.tie_word_embeddings = True
        model.pop("lm_head")
    weights = _read_weights(header, architecture, config, dtype)
    _add_missing_bias(weights, config)
    own = None if keeps_floats else float_type(header, architecture.half)
    kind = dtype or own
    kept = _quantizable(model) if dtype is None else frozenset()
    _make_dense(
        [n for n, w in weights.items() if w.format and n not in kept], weights, kind or mx.float32
    )
    formats = {n.removesuffix(".weight"): w.format for n, w in weights.items() if w.format}
    _load_weights(header, model, formats, _arrays(weights, architecture, kind))
    if _ROPE_FACTORS in header.tensors:
        factors = read_weight(header, _ROPE_FACTORS, None).dense()
        _set_rope_factors(header, model, config, factors)
    leave_untruncated(model, config)
    evaluate(model)
    return model, config


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


def _read_weights(
    header: GgufHeader, architecture: Architecture, config: Config, dtype: mx.Dtype | None
) -> Weights:
    weights: Weights = {}
    for name in _own_tensors(header, config):
        weight = read_weight(header, name, dtype)
        if change := _look_up(architecture.changes, _part(name)):
            weight = change[0](weight, config)
        for part, rows in _halves_of_experts(name, weight).items():
            weights[rename(header, architecture, part)] = rows
    if architecture.join:
        architecture.join(weights, config)
    return weights


def _halves_of_experts(name: str, weight: Weight) -> dict[str, Weight]:
    """Part the gates of the experts from what they let through, if a file has them in one tensor."""
    if "ffn_gate_up_exps" not in name:
        return {name: weight}
    return {
        name.replace("gate_up", "gate"): weight.map(lambda rows: mx.split(rows, 2, axis=1)[0]),
        name.replace("gate_up", "up"): weight.map(lambda rows: mx.split(rows, 2, axis=1)[1]),
    }


def _own_tensors(header: GgufHeader, config: Config) -> Iterator[str]:
    """Yield the names of the model's tensors, not those of layers that predict further tokens."""
    for name in header.tensors:
        match name.split("."):
            case ["blk", layer, *_] if layer.isdecimal():
                is_own = int(layer) < config["num_hidden_layers"]
            case _:
                is_own = name not in NOT_WEIGHTS
        if is_own:
            yield name


def rename(header: GgufHeader, architecture: Architecture, name: str) -> str:
    """Return mlx-lm's name of a tensor: `blk.0.attn_q.weight` is q_proj's of layer 0."""
    part = _part(name)
    found = _look_up(_NAMES if part == name else architecture.names, part)
    if found is None:
        raise header.refuse(f"unknown tensor {name}")
    layer = "" if part == name else f"layers.{name.split('.')[1]}."
    renamed = "".join(found)
    # Of what stands outside of layers all but the head is the inner model's.
    inner = "" if renamed.startswith("lm_head") else "model."
    return f"{architecture.prefix}{inner}{layer}{renamed}"


def _part(name: str) -> str:
    """Return the name inside its layer, if it has one."""
    match name.split(".", 2):
        case ["blk", _, part]:
            return part
    return name


def _look_up(table: Mapping[str, T], part: str) -> tuple[T, str] | None:
    """Find a name as it stands, or without `.weight` or `.bias`, and return that, too."""
    if part in table:
        return table[part], ""
    stem, dot, kind = part.rpartition(".")
    return (table[stem], dot + kind) if stem in table else None


def _add_missing_bias(weights: Weights, config: Config) -> None:
    """Give o_proj a bias of zero where only q, k and v have one: mlx-lm's llama has all or none."""
    if config["model_type"] not in ("llama", "granite") or not config["attention_bias"]:
        return
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}.self_attn.o_proj.bias"
        weights.setdefault(name, Weight({"weight": mx.zeros(config["hidden_size"])}))


def _build(config: Config) -> nn.Module:
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    assert isinstance(model, nn.Module)
    return model


def _quantizable(model: nn.Module) -> frozenset[str]:
    """Return the weights that the model can keep quantized."""
    return frozenset(
        f"{path}.weight"
        for path, module in model.named_modules()
        if hasattr(module, "to_quantized")
    )


def _make_dense(quantized: list[str], weights: Weights, dtype: mx.Dtype) -> None:
    for names in _several_at_once(sorted(quantized)):
        for name, stream in names:
            with mx.stream(stream):
                weights[name] = Weight({"weight": weights[name].dense().astype(dtype)})
        mx.eval([weights[name].parts["weight"] for name, _ in names])


def _arrays(
    weights: Weights, architecture: Architecture, dtype: mx.Dtype | None
) -> dict[str, mx.array]:
    """Name every part, in one float type or its own; empties `weights` so that both need not fit."""
    arrays: dict[str, mx.array] = {}
    for name in list(weights):
        kind = mx.float32 if name.endswith(tuple(architecture.exact)) else dtype
        for part, array in weights.pop(name).parts.items():
            is_packed = array.dtype in (mx.uint32, mx.uint8)
            stored = f"{name.removesuffix('weight')}{part}" if part != "weight" else name
            arrays[stored] = array if is_packed or kind is None else array.astype(kind)
    return arrays


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


def _load_weights(
    header: GgufHeader,
    model: nn.Module,
    formats: Mapping[str, Format],
    arrays: dict[str, mx.array],
) -> None:
    def quantization(path: str, module: nn.Module) -> bool | dict[str, int | str]:
        return asdict(formats[path]) if path in formats else False

    if formats:
        nn.quantize(model, class_predicate=quantization)
    try:
        model.load_weights(list(arrays.items()), strict=True)
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
