"""Tensors of a GGUF file as MLX's arrays: the same weights, in MLX's order of bits.

ggml's block formats are MLX's in another order wherever a group of weights shares one scale and
one bias, or one exponent: these stay as they are stored.  The scale of some is a product, which
is float32.  Values from a grid are integers of 8 bits.  A scale for every 16 weights only the native
kernels know; for MLX, `gguf` dequantizes such a type, and it becomes 8 bits with other scales.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import mlx.core as mx
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as dequantize_rows
from numpy.typing import NDArray

from batching.backend.gguf.file.blocks import GROUPS_OF, Bytes
from batching.model_files.gguf_formats import (
    EIGHT_BITS,
    KERNEL_FORMATS,
    OF_PRODUCTS,
    Format,
    format_of,
    loses_bits,
)
from batching.model_files.gguf_header import GgufHeader, Tensor

# Weights that are converted at once: what a tensor needs beside its result is bounded.
_MAX_WEIGHTS: Final = 1 << 24
FLOATS: Final = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}

# The smallest float16 above 0: a group whose weights are all the same has a step of 0.
_LEAST_STEP: Final = 2.0**-24


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor by its parts (`weight`, and where quantized `scales` and perhaps `biases`).

    The parts have the same rows, so that rows are moved, taken and joined in each alike.
    """

    parts: dict[str, mx.array]
    format: Format | None = None

    def map(self, change: Callable[[mx.array], mx.array]) -> "Weight":
        return replace(self, parts={name: change(part) for name, part in self.parts.items()})

    def dense(self) -> mx.array:
        """Dequantize, in float32: rounding to the scales' float16 would change the weights."""
        if self.format is None:
            return self.parts["weight"]
        scales, biases = self.parts["scales"], self.parts.get("biases")
        if biases is not None:
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        return mx.dequantize(
            self.parts["weight"],
            scales,
            biases,
            group_size=self.format.group_size,
            bits=self.format.bits,
            mode=self.format.mode,
            dtype=mx.float32,
        )


def join(first: Weight, second: Weight) -> Weight:
    """Put the rows of one below the rows of the other."""
    if first.format != second.format:
        first, second = _eight_bits(first), _eight_bits(second)
    parts = {
        name: mx.concatenate([part, second.parts[name]], axis=-2)
        for name, part in first.parts.items()
    }
    return Weight(parts, first.format)


def _eight_bits(weight: Weight) -> Weight:
    if weight.format == EIGHT_BITS:
        return weight
    return quantize(weight.dense())


def read_weight(
    header: GgufHeader, name: str, dtype: mx.Dtype | None, *, has_kernels: bool = False
) -> Weight:
    """Read a tensor; what MLX has no format for is dequantized to `dtype`, or becomes 8 bits.

    has_kernels: also the formats stay that only the native kernels know.
    """
    tensor = header.tensors[name]
    if (kind := FLOATS.get(tensor.type_name)) is not None:
        return Weight({"weight": _read_floats(header, tensor, kind)})
    pieces = [
        _convert(rows, tensor.type_name, dtype, has_kernels)
        for rows in _pieces_of_rows(header, tensor)
    ]
    joined = pieces[0].map(lambda part: part)
    for part in joined.parts:
        joined.parts[part] = mx.concatenate([piece.parts[part] for piece in pieces])
    return joined.map(lambda part: part.reshape(*tensor.shape[:-1], -1))


def outline_weight(
    header: GgufHeader, name: str, dtype: mx.Dtype | None, *, has_kernels: bool = False
) -> Weight:
    """Return what `read_weight` would, of zeros that take no memory until they are computed."""
    tensor = header.tensors[name]
    kept = format_of(tensor.type_name, has_kernels=has_kernels)
    is_lossy = loses_bits(tensor.type_name, has_kernels=has_kernels)
    if kept is None or (dtype is not None and is_lossy):
        return Weight({"weight": mx.zeros(tensor.shape, FLOATS.get(tensor.type_name, dtype))})
    *rows, length = tensor.shape
    num_groups = length // kept.group_size
    parts = {"weight": mx.zeros((*rows, length * kept.bits // 32), mx.uint32)}
    is_product = tensor.type_name in OF_PRODUCTS and not is_lossy
    of_affine = mx.float32 if is_product else mx.float16
    is_affine = kept.mode == "affine"
    for part in ("scales", "biases") if is_affine else ("scales",):
        parts[part] = mx.zeros((*rows, num_groups), of_affine if is_affine else mx.uint8)
    return Weight(parts, kept)


def _convert(rows: Bytes, type_name: str, dtype: mx.Dtype | None, has_kernels: bool) -> Weight:
    if not loses_bits(type_name, has_kernels=has_kernels):
        return _repacked(rows, type_name, KERNEL_FORMATS[type_name])
    values = mx.array(dequantize_rows(rows, GGMLQuantizationType[type_name]))
    return quantize(values) if dtype is None else Weight({"weight": values.astype(dtype)})


def _read_floats(header: GgufHeader, tensor: Tensor, kind: mx.Dtype) -> mx.array:
    stored = np.uint16 if kind == mx.bfloat16 else np.float16 if kind == mx.float16 else np.float32
    values = mx.array(_mapped(header, tensor).view(stored).reshape(tensor.shape))
    return values.view(kind) if kind == mx.bfloat16 else values


def _mapped(header: GgufHeader, tensor: Tensor) -> Bytes:
    start = header.data_start + tensor.start
    return np.memmap(header.path, np.uint8, "r", start, (tensor.num_bytes,))


def _pieces_of_rows(header: GgufHeader, tensor: Tensor) -> Iterator[Bytes]:
    """Yield the bytes of some rows at a time."""
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.type_name]]
    length = tensor.shape[-1]
    rows = _mapped(header, tensor).reshape(-1, length // block * block_bytes)
    at_once = max(1, _MAX_WEIGHTS // length)
    for start in range(0, len(rows), at_once):
        yield rows[start : start + at_once]


def _repacked(rows: Bytes, type_name: str, kept: Format) -> Weight:
    _, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    groups = GROUPS_OF[type_name](rows.reshape(-1, block_bytes))
    parts = {"weight": mx.array(_words(groups.weights.reshape(len(rows), -1), kept.bits))}
    for name, values in (("scales", groups.scales), ("biases", groups.biases)):
        if values is not None:
            is_float16 = values.dtype != np.uint8 and type_name not in OF_PRODUCTS
            stored = values.astype(np.float16) if is_float16 else values
            parts[name] = mx.array(stored.reshape(len(rows), -1))
    return Weight(parts, kept)


def _words(stored: Bytes, bits: int) -> NDArray[np.uint32]:
    """Pack weights one after the other, lowest bits first: eight take as many bytes as bits."""
    packed = stored
    if bits == 4:
        pairs = stored.reshape(len(stored), -1, 2)
        packed = pairs[..., 0] | pairs[..., 1] << np.uint8(4)
    elif bits != 8:
        eights = stored.reshape(len(stored), -1, 8).astype(np.uint64)
        shifts = np.arange(0, 8 * bits, bits, dtype=np.uint64)
        words = np.bitwise_or.reduce(eights << shifts, axis=-1)
        packed = words.astype("<u8")[..., None].view(np.uint8)[..., :bits]
    return np.ascontiguousarray(packed).reshape(len(stored), -1).view(np.uint32)


def quantize(values: mx.array) -> Weight:
    """Quantize to 8 bits and float16 scales: a weight moves by no more than half a step.

    `mx.quantize` keeps zeros exact in place of that, and moves others by a whole step.
    """
    groups = mx.unflatten(values.astype(mx.float32), -1, (-1, EIGHT_BITS.group_size))
    least = groups.min(-1, keepdims=True).astype(mx.float16)
    steps = ((groups.max(-1, keepdims=True) - least) / 255).astype(mx.float16)
    stored = mx.round((groups - least) / mx.maximum(steps, _LEAST_STEP))
    words = mx.clip(stored, 0, 255).astype(mx.uint8).flatten(-2).view(mx.uint32)
    return Weight({"weight": words, "scales": steps[..., 0], "biases": least[..., 0]}, EIGHT_BITS)
