"""Sizes of a GGUF file's tensors in memory, before any is read."""

import math
import re
from typing import NamedTuple

import mlx.core as mx

from batching.backend.gguf.architecture.known import ARCHITECTURES
from batching.backend.gguf.file.quantizations import FLOATS
from batching.backend.gguf.tensors import NOT_WEIGHTS
from batching.backend.weights.storage import (
    Stored,
    dtype_name,
    kernel_float,
    quantization_name,
)
from batching.model_files.gguf_formats import format_of, kernel_bits, loses_bits, parameter_bits
from batching.model_files.gguf_header import GgufHeader, Tensor


class _Kept(NamedTuple):
    name: str
    bits: float
    is_rounded: bool


def float_type(header: GgufHeader) -> mx.Dtype:
    """Return the type of what is not quantized: scales of float16 are exact in no other half."""
    types = {tensor.type_name for tensor in header.tensors.values()}
    formats = [format_of(name) for name in types]
    if "F16" in types or any(kept and kept.mode == "affine" for kept in formats):
        known = ARCHITECTURES.get(header.text("general.architecture") or "")
        return known.half if known else mx.float16
    return mx.float32 if types == {"F32"} else mx.bfloat16


def num_bytes(header: GgufHeader, dtype: mx.Dtype | None, *, has_kernels: bool = False) -> int:
    """Return the memory that the weights take once they are loaded."""
    bits = sum(
        math.prod(tensor.shape) * _kept(header, tensor, dtype, has_kernels).bits
        for name, tensor in header.tensors.items()
        if name not in NOT_WEIGHTS
    )
    return int(bits) // 8


def stored_tensors(
    header: GgufHeader, dtype: mx.Dtype | None, *, has_kernels: bool
) -> tuple[Stored, ...]:
    """Return the file's matrices; norms and biases are of no weight."""
    tensors: list[Stored] = []
    for tensor in header.tensors.values():
        if len(tensor.shape) > 1:
            kept = _kept(header, tensor, dtype, has_kernels)
            kept_bytes = int(math.prod(tensor.shape) * kept.bits) // 8
            if kept.name == tensor.type_name:
                kept_bytes = tensor.num_bytes
            tensors.append(
                Stored(tensor.type_name, tensor.num_bytes, kept.name, kept_bytes, kept.is_rounded)
            )
    return tuple(tensors)


def _kept(header: GgufHeader, tensor: Tensor, dtype: mx.Dtype | None, has_kernels: bool) -> _Kept:
    stored = format_of(tensor.type_name, has_kernels=has_kernels)
    if dtype is not None or stored is None:
        return _kept_floats(header, tensor, dtype, has_kernels)
    is_rounded = loses_bits(tensor.type_name, has_kernels=has_kernels)
    bits = kernel_bits(stored.mode, stored.bits, stored.group_size) if has_kernels else stored.bits
    if bits is None:
        return _Kept("bfloat16", 16, is_rounded)
    is_as_stored = not is_rounded and bits == _bits_of(tensor.type_name)
    name = tensor.type_name if is_as_stored else quantization_name(stored.mode, bits)
    if not has_kernels:
        return _Kept(name, stored.stored_bits, is_rounded)
    return _Kept(name, bits + parameter_bits(tensor.type_name, stored), is_rounded)


def _kept_floats(
    header: GgufHeader, tensor: Tensor, dtype: mx.Dtype | None, has_kernels: bool
) -> _Kept:
    own = FLOATS.get(tensor.type_name)
    kept = dtype or (own if own and has_kernels else float_type(header))
    is_rounded = kept != mx.float32 and (own is None or kept != own)
    kept = kernel_float(kept) if has_kernels else kept
    return _Kept(
        tensor.type_name if own is not None and kept == own else dtype_name(kept),
        8 * kept.size,
        is_rounded,
    )


def _bits_of(type_name: str) -> int:
    """Return the bits of a weight without its scales: 4 of Q4_K."""
    return int("".join(re.findall(r"^\D*(\d)", type_name)))
