"""Weights that are not kept as their files store them: what they become, and what that costs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.mla import QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from batching.model_files.gguf_formats import kernel_bits

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_MATRICES: Final = (nn.Linear, nn.Embedding, SwitchLinear)
_QUANTIZED: Final = (
    nn.QuantizedLinear,
    nn.QuantizedEmbedding,
    QuantizedSwitchLinear,
    QuantizedMultiLinear,
)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of weights: what it is stored as, and what it is kept as."""

    name: str
    num_bytes: int
    kept: str
    kept_bytes: int
    is_rounded: bool = False


def storage_line(tensors: Sequence[Stored]) -> str:
    """Name what is not kept as it is stored; empty if all is.

    A decode step reads all weights, or of the experts a share, and takes as long as that.
    """
    changed = sorted((t for t in tensors if t.name != t.kept), key=_conversion)
    if not changed:
        return ""
    parts = [_part(list(alike)) for _, alike in groupby(changed, key=_conversion)]
    ratio = sum(t.kept_bytes for t in tensors) / sum(t.num_bytes for t in tensors)
    return f"{'; '.join(parts)}: {ratio:.1f} times the bytes in each decode step"


def _conversion(tensor: Stored) -> tuple[str, str, bool]:
    return tensor.name, tensor.kept, tensor.is_rounded


def _part(alike: Sequence[Stored]) -> str:
    name, kept, is_rounded = _conversion(alike[0])
    before, after = _size(t.num_bytes for t in alike), _size(t.kept_bytes for t in alike)
    how = "rounded" if is_rounded else "exact"
    return f"{name} ({len(alike)} tensors, {before}) as {kept} ({how}, {after})"


def _size(sizes: Iterable[int]) -> str:
    total = sum(sizes)
    return f"{total / _GIB:.1f} GiB" if total >= _GIB else f"{-(-total // _MIB)} MiB"


def kernel_float(dtype: mx.Dtype) -> mx.Dtype:
    """Return what the kernels keep floats of a type as."""
    return mx.bfloat16 if dtype == mx.bfloat16 else mx.float32


def dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def quantization_name(mode: str, bits: int) -> str:
    return f"{bits} bits" if mode == "affine" else mode


def stored_tensors(
    model: nn.Module, dtype: mx.Dtype | None, *, has_kernels: bool
) -> tuple[Stored, ...]:
    """Return the matrices of a model as mlx-lm has loaded it, before anything is changed."""
    known = (*_MATRICES, *_QUANTIZED)
    matrices = (module for module in model.modules() if type(module) in known)
    return tuple(_stored(module, dtype, has_kernels) for module in matrices)


def _stored(module: Any, dtype: mx.Dtype | None, has_kernels: bool) -> Stored:
    if "scales" not in module:
        return _stored_floats(module.weight, dtype, has_kernels)
    name = quantization_name(module.mode, module.bits)
    parts = (module.get(part) for part in ("weight", "scales", "biases", "global_scale"))
    num_bytes = sum(part.nbytes for part in parts if part is not None)
    num_weights = module.weight.size * 32 // module.bits
    bits: int | None = module.bits
    if has_kernels:
        is_per_head = isinstance(module, QuantizedMultiLinear)
        bits = None if is_per_head else kernel_bits(module.mode, module.bits, module.group_size)
        unknown = mx.float32 if is_per_head else mx.bfloat16
    if dtype is None and bits is not None:
        kept = name if bits == module.bits else f"{bits} bits"
        return Stored(name, num_bytes, kept, num_bytes + num_weights * (bits - module.bits) // 8)
    dense = unknown if dtype is None else dtype
    has_global_scale = module.get("global_scale") is not None
    is_rounded = dense != mx.float32 and (module.mode == "affine" or has_global_scale)
    dense = kernel_float(dense) if has_kernels else dense
    return Stored(name, num_bytes, dtype_name(dense), num_weights * dense.size, is_rounded)


def _stored_floats(weight: mx.array, dtype: mx.Dtype | None, has_kernels: bool) -> Stored:
    kept = dtype or weight.dtype
    is_rounded = kept not in (mx.float32, weight.dtype)
    kept = kernel_float(kept) if has_kernels else kept
    return Stored(
        dtype_name(weight.dtype),
        weight.nbytes,
        dtype_name(kept),
        weight.size * kept.size,
        is_rounded,
    )
