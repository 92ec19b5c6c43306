"""Models from GGUF files.

The file's tensors get mlx-lm's names, its metadata becomes mlx-lm's config, and mlx-lm's own
model runs them.  Weights are as in a Hugging Face checkpoint, the rows of q and k too, so that
adapters of that fit.  One thing of llama differs: llama 3's rope scaling is a tensor of factors,
`rope_freqs.weight`, in place of parameters.
"""

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Final

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import Llama3RoPE

from batching.backend.gguf.architecture.metadata import Config
from batching.backend.gguf.config import architecture_of, read_config
from batching.backend.gguf.file.quantizations import Weight, outline_weight, read_weight
from batching.backend.gguf.storage import float_type
from batching.backend.gguf.tensors import (
    ROPE_FACTORS,
    layer_of,
    look_up,
    own_tensors,
    part_of,
    rename,
)
from batching.backend.yarn import leave_untruncated
from batching.engine.load_slices import ONE_SLICE, LoadSlices
from batching.model_files.gguf_formats import Format
from batching.model_files.gguf_header import GgufHeader

Weights = dict[str, Weight]

# What a slice reads, in a fraction of a second from most disks.
_SLICE_BYTES: Final = 16 << 20
# Of the progress of a load; the self-check follows.
_SHARE_OF_WEIGHTS: Final = 0.8
# Streams that dequantize; each works on one tensor, in memory of its own.
_MAX_STREAMS: Final = 8


class GgufOutline:
    """The model of a GGUF file, whose arrays are zeros without memory until they are read.

    dtype: all weights are dequantized to it.  With None, quantized weights stay quantized, and float
        weights become float16 like the scales of the quantized ones, since a float32 norm would turn all
        activations into float32; both become bfloat16 if activations exceed the range of float16.  A file
        of float32 only stays float32, and one without any float16 becomes bfloat16.
    has_kernels: for the native kernels, whose activations are always float32: each array keeps its type,
        scales that are products are float32, and groups may have 16 weights, so that nothing is rounded.
    """

    def __init__(
        self, header: GgufHeader, dtype: mx.Dtype | None, *, has_kernels: bool = False
    ) -> None:
        self._header, self._dtype, self._has_kernels = header, dtype, has_kernels
        self._architecture, _ = architecture_of(header)
        self.config = read_config(header)
        self.model = _build(self.config)
        if self.config["tie_word_embeddings"] and hasattr(self.model, "tie_word_embeddings"):
            # gemma3_text does not look into its config.
            self.model.tie_word_embeddings = True
            self.model.pop("lm_head")
        own_float = None if has_kernels else float_type(header)
        self._float = dtype or own_float
        self._kept = _quantizable(self.model) if dtype is None else frozenset[str]()
        own = list(own_tensors(header, self.config))
        weights = self._weights(own, is_outline=True)
        _add_missing_bias(weights, self.config)
        for _ in self._make_dense(weights):
            continue
        formats = {n.removesuffix(".weight"): w.format for n, w in weights.items() if w.format}
        _load_weights(header, self.model, formats, self._arrays(weights))
        if ROPE_FACTORS in header.tensors:
            factors = read_weight(header, ROPE_FACTORS, None).dense()
            _set_rope_factors(header, self.model, self.config, factors)
        leave_untruncated(self.model, self.config)
        self.model.eval()
        self._tensors: dict[str, list[str]] = {}
        for name in own:
            part = layer_of(name) or self._module_of(name)
            self._tensors.setdefault(part, []).append(name)

    def _module_of(self, name: str) -> str:
        return _last(rename(self._header, self._architecture, name).rpartition(".")[0])

    def read_all(self, slices: LoadSlices = ONE_SLICE) -> None:
        for part in list(self._tensors):
            self._read(part)
            slices.pause()

    def read(self, path: str) -> None:
        """Read the arrays of the part at a path of the model; of no path, all that are left."""
        if path:
            self._read(_last(path))
        else:
            self.read_all()

    def _read(self, part: str) -> None:
        weights = self._weights(self._tensors.pop(part, []))
        for names in self._make_dense(weights):
            mx.eval([weights[name].parts["weight"] for name in names])
        self.model.load_weights(list(self._arrays(weights).items()), strict=False)

    def _weights(self, names: Sequence[str], *, is_outline: bool = False) -> Weights:
        header, weights = self._header, Weights()
        read = outline_weight if is_outline else read_weight
        for name in names:
            weight = read(header, name, self._dtype, has_kernels=self._has_kernels)
            if change := look_up(self._architecture.changes, part_of(name)):
                weight = change[0](weight, self.config)
            for part, rows in _halves_of_experts(name, weight).items():
                weights[rename(header, self._architecture, part)] = rows
        if self._architecture.join:
            self._architecture.join(weights, self.config)
        return weights

    def _make_dense(self, weights: Weights) -> Iterator[list[str]]:
        """Dequantize what the model cannot keep quantized; yield some names at a time, to compute."""
        quantized = sorted(n for n, w in weights.items() if w.format and n not in self._kept)
        for names in self._several_at_once(quantized):
            for name, stream in names:
                with mx.stream(stream):
                    dense = weights[name].dense().astype(self._float or mx.float32)
                weights[name] = Weight({"weight": dense})
            yield [name for name, _ in names]

    def _several_at_once(self, names: Sequence[str]) -> Iterator[list[tuple[str, mx.Stream]]]:
        """Yield as many names as there are streams: one stream uses one core."""
        streams = self._streams if names else []
        for start in range(0, len(names), len(streams) or 1):
            yield list(zip(names[start:], streams, strict=False))

    @cached_property
    def _streams(self) -> list[mx.Stream]:
        if mx.default_device() != mx.cpu:
            return [mx.default_stream(mx.default_device())]
        count = min(os.cpu_count() or 1, _MAX_STREAMS)
        return [mx.new_stream(mx.Device(mx.cpu)) for _ in range(count)]

    def _arrays(self, weights: Weights) -> dict[str, mx.array]:
        """Name every part, in one float type or its own; empties `weights` so that both need not fit."""
        arrays: dict[str, mx.array] = {}
        exact = tuple(self._architecture.exact)
        for name in list(weights):
            kind = mx.float32 if name.endswith(exact) else self._float
            for part, array in weights.pop(name).parts.items():
                is_packed = array.dtype in (mx.uint32, mx.uint8)
                stored = f"{name.removesuffix('weight')}{part}" if part != "weight" else name
                arrays[stored] = array if is_packed or kind is None else array.astype(kind)
        return arrays


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def evaluate(model: nn.Module, slices: LoadSlices = ONE_SLICE) -> None:
    """Compute every array that the model holds, so many at a time that a slice stays short."""
    model.eval()
    arrays = arrays_of(model)
    total, done = max(1, sum(array.nbytes for array in arrays)), 0
    some: list[mx.array] = []
    for array in arrays:
        some.append(array)
        done += array.nbytes
        if sum(each.nbytes for each in some) >= _SLICE_BYTES:
            mx.eval(some)
            some = []
            slices.pause(_SHARE_OF_WEIGHTS * done / total)
    mx.eval(some)


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


def _halves_of_experts(name: str, weight: Weight) -> dict[str, Weight]:
    """Part the gates of the experts from what they let through, if a file has them in one tensor."""
    if "ffn_gate_up_exps" not in name:
        return {name: weight}
    return {
        name.replace("gate_up", "gate"): weight.map(lambda rows: mx.split(rows, 2, axis=1)[0]),
        name.replace("gate_up", "up"): weight.map(lambda rows: mx.split(rows, 2, axis=1)[1]),
    }


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


def _load_weights(
    header: GgufHeader,
    model: nn.Module,
    formats: Mapping[str, Format],
    arrays: dict[str, mx.array],
) -> None:
    def quantization(path: str, module: nn.Module) -> bool | dict[str, int | str]:
        if path not in formats:
            return False
        return asdict(replace(formats[path], group_size=formats[path].mlx_group_size))

    if formats:
        nn.quantize(model, class_predicate=quantization)
        _set_small_groups(model, formats)
    try:
        model.load_weights(list(arrays.items()), strict=True)
    except ValueError as error:
        raise header.refuse(f"tensors and metadata disagree: {error}") from error


def _set_small_groups(model: nn.Module, formats: Mapping[str, Format]) -> None:
    """Give modules the groups that MLX cannot make them with; only the native kernels compute these."""
    for path, module in model.named_modules():
        if path in formats and formats[path].group_size < module.group_size:
            ratio = module.group_size // formats[path].group_size
            module.group_size = formats[path].group_size
            for name in ("scales", "biases"):
                module[name] = mx.repeat(module[name], ratio, axis=-1)


def _set_rope_factors(
    header: GgufHeader, model: nn.Module, config: Config, factors: mx.array
) -> None:
    """Divide the rope frequencies by the file's factors."""
    dims = config["head_dim"]
    if config["rope_scaling"] is not None or factors.shape != (dims // 2,):
        raise header.refuse(f"{ROPE_FACTORS} of shape {factors.shape} with other rope scaling")
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
