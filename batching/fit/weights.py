"""The bytes that weights take once they are loaded, computed from the headers of their files."""

import math
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple

from batching.model_files.description import ModelDescription
from batching.model_files.gguf_formats import format_of, kernel_bits, parameter_bits
from batching.model_files.tensor import StoredTensor

_DTYPES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
# Of safetensors, with the bytes of a number; those of 8 bits become bfloat16.
_FLOATS: Final = {"F64": 4, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 2, "F8_E5M2": 2}
_GROUP_SIZE: Final = 64
_PARTS: Final = ("weight", "scales", "biases")
# Matrices of latent attention that have a product for each head; the kernels keep them in float32.
_PER_HEAD: Final = ("embed_q", "unembed_out", "kv_b_proj")
# Layers, without experts in files that have each by itself.
_ADAPTED: Final = re.compile(r"(^|\.)(layers|blocks|blk|h)\.\d+\.(?!(.*\.)?experts\.)")


class Compute(StrEnum):
    """Who computes a model, on which depends how its weights are kept.

    STORED: MLX on a GPU, as they are stored.
    KERNELS: the native kernels of a CPU.
    FLOATS: MLX on a CPU, in float32.
    """

    STORED = "stored"
    KERNELS = "kernels"
    FLOATS = "floats"


def weight_bytes(model: ModelDescription, compute: Compute, dtype: str = "auto") -> int:
    """Return the bytes of a model's weights.

    dtype: the type to which they are converted; `auto` leaves that to who computes.
    """
    size = _DTYPES.get(dtype)
    if size is None and compute is Compute.FLOATS:
        size = _DTYPES["float32"]
    if compute is Compute.KERNELS and dtype == "float16":
        size = _DTYPES["float32"]
    has_kernels = compute is Compute.KERNELS
    if model.is_gguf:
        return _of_gguf(model.tensors, size, has_kernels)
    return _of_safetensors(model, size, has_kernels) + _of_tower(model.tower, size)


def _of_tower(tensors: Sequence[StoredTensor], size: int | None) -> int:
    """Return the bytes of a vision part, which MLX computes everywhere."""
    return sum(
        tensor.num_bytes if size is None else math.prod(tensor.shape) * size for tensor in tensors
    )


def _of_gguf(tensors: Sequence[StoredTensor], size: int | None, has_kernels: bool) -> int:
    # MLX has one type for all that is not quantized: 16 bits, unless the file has nothing else than floats of 32.
    has_halves = {tensor.type_name for tensor in tensors} != {"F32"}
    bits = sum(
        math.prod(tensor.shape) * _gguf_bits(tensor.type_name, size, has_kernels, has_halves)
        for tensor in tensors
    )
    return int(bits) // 8


def _gguf_bits(type_name: str, size: int | None, has_kernels: bool, has_halves: bool) -> float:
    """Return the bits of a weight, with its part of a scale and a bias."""
    if size is not None:
        return 8 * size
    kept = format_of(type_name, has_kernels=has_kernels)
    if kept is None:
        is_half = type_name == "BF16" if has_kernels else has_halves
        return 16 if is_half else 32
    if not has_kernels:
        return kept.stored_bits
    bits = kernel_bits(kept.mode, kept.bits, kept.group_size)
    return 16 if bits is None else bits + parameter_bits(type_name, kept)


def adapter_bytes(num_adapted: int, rank: int) -> int:
    """Return the bytes of an adapter of a rank, for layers with so many inputs and outputs: most have float32."""
    return _DTYPES["float32"] * rank * num_adapted


def num_adapted(model: ModelDescription) -> int:
    """Return the inputs and outputs of all layers that take adapters: a number of each for each rank."""
    scales = {tensor.name: tensor.shape for tensor in model.tensors}
    total = 0
    for tensor in model.tensors:
        name, _, part = tensor.name.rpartition(".")
        is_linear = part == "weight" and len(tensor.shape) == 2
        if not is_linear or not _ADAPTED.search(name) or name.rpartition(".")[2] in _PER_HEAD:
            continue
        outputs, inputs = tensor.shape
        if (groups := scales.get(f"{name}.scales")) is not None:
            inputs = groups[1] * _quantization_of(model, name).group_size
        total += inputs + outputs
    return total


class _Quantization(NamedTuple):
    """How mlx-lm has quantized a matrix."""

    mode: str
    group_size: int

    @classmethod
    def of(cls, *settings: object) -> "_Quantization":
        """Return what settings say, the later ones outranking; they are of a foreign file."""
        found: dict[str, Any] = {}
        for each in settings:
            found |= each if isinstance(each, dict) else {}
        size = found.get("group_size")
        group_size = size if isinstance(size, int) and size > 0 else _GROUP_SIZE
        return cls(str(found.get("mode", "affine")), group_size)


def _quantization_of(model: ModelDescription, name: str) -> _Quantization:
    settings = model.config.get("quantization")
    own = settings.get(name) if isinstance(settings, dict) else None
    return _Quantization.of(settings, own)


def _of_safetensors(model: ModelDescription, size: int | None, has_kernels: bool) -> int:
    scales = {
        tensor.name.rpartition(".")[0]: tensor
        for tensor in model.tensors
        if tensor.name.endswith(".scales")
    }
    total = 0
    for tensor in model.tensors:
        name, _, part = tensor.name.rpartition(".")
        if name not in scales or part not in _PARTS:
            total += _dense_bytes(tensor, model.config, size, has_kernels)
            continue
        quantization = _quantization_of(model, name)
        if part == "weight":
            total += _quantized_bytes(tensor, scales[name], quantization, size, has_kernels)
        elif size is None:
            total += _parameter_bytes(tensor, quantization, has_kernels)
    return total


def _quantized_bytes(
    weight: StoredTensor,
    scales: StoredTensor,
    quantization: _Quantization,
    size: int | None,
    has_kernels: bool,
) -> int:
    mode, group_size = quantization
    num_weights = math.prod(scales.shape) * group_size
    if size is not None:
        # mlx-lm makes bfloat16 of formats without a bias.
        return num_weights * (size if mode == "affine" else _DTYPES["bfloat16"])
    if not has_kernels:
        return weight.num_bytes
    if weight.name.removesuffix(".weight").rpartition(".")[2] in _PER_HEAD:
        return num_weights * _DTYPES["float32"]
    stored_bits = weight.num_bytes * 8 // max(1, num_weights)
    bits = kernel_bits(mode, stored_bits, group_size)
    return num_weights * _DTYPES["bfloat16"] if bits is None else num_weights * bits // 8


def _parameter_bytes(tensor: StoredTensor, quantization: _Quantization, has_kernels: bool) -> int:
    """Return the bytes of scales or biases; there are none where the weights become floats."""
    mode, group_size = quantization
    is_kept = not has_kernels or kernel_bits(mode, 4, group_size) is not None
    return tensor.num_bytes if is_kept else 0


def _dense_bytes(
    tensor: StoredTensor, config: Mapping[str, Any], size: int | None, has_kernels: bool
) -> int:
    count = math.prod(tensor.shape)
    if (own := _FLOATS.get(tensor.type_name)) is not None:
        kept = own if size is None else size
        if has_kernels and size is None and tensor.type_name == "F16":
            kept = _DTYPES["float32"]
        return count * kept
    if size is None:
        return tensor.num_bytes
    # Weights of AWQ, GPTQ and the like, packed into integers.
    return tensor.num_bytes * 8 // _packed_bits(config) * size


def _packed_bits(config: Mapping[str, Any]) -> int:
    declared = config.get("quantization_config")
    bits = declared.get("bits") if isinstance(declared, dict) else None
    return bits if isinstance(bits, int) and bits > 0 else 8
