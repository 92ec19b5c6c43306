"""Q4_K tensors, the ones that most GGUF files consist of, without loss.

`mx.load` (0.32) gives every second group of 32 weights the scale of the group before it.  The
format is MLX's own in another order, so it is put in that order here: 4 bits, groups of 32.
"""

from typing import Any, Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from batching.backend.gguf.header import GgufHeader

Bytes = NDArray[np.uint8]

_BLOCK_BYTES: Final = 144


def read_q4_k(header: GgufHeader, name: str) -> dict[str, mx.array]:
    """Return a tensor as `weight`, `scales` and `biases` of an MLX quantized module.

    A block is: scale of the scales, scale of the minima (float16 each), 8 scales and 8 minima
    of 6 bits in 12 bytes, and 256 weights of 4 bits.
    """
    tensor = header.tensors[name]
    start = header.data_start + tensor.start
    mapped = np.memmap(header.path, np.uint8, "r", start, (tensor.num_bytes,))
    blocks: Bytes = mapped.reshape(-1, _BLOCK_BYTES)
    of_scales, of_minima = _float16(blocks[:, 0:4]).astype(np.float32).T[..., None]
    scales, minima = _unpack_scales(blocks[:, 4:16])
    rows = tensor.shape[:-1]
    module = name.removesuffix(".weight")
    return {
        name: mx.array(_words(blocks[:, 16:]).reshape(*rows, -1)),
        f"{module}.scales": _halves(of_scales * scales, rows),
        f"{module}.biases": _halves(-of_minima * minima, rows),
    }


def _unpack_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Split 12 bytes into 8 scales and 8 minima; the last four of each are in two places."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = [low & 63, (high & 15) | (low >> 6 << 4)]
    minima = [middle & 63, (high >> 4) | (middle >> 6 << 4)]
    return np.concatenate(scales, axis=1), np.concatenate(minima, axis=1)


def _words(packed: Bytes) -> NDArray[np.uint32]:
    """Put weights in their order: 32 bytes hold 32 weights in their low halves, then 32 more."""
    halves = packed.reshape(-1, 1, 32)
    weights = np.concatenate([halves & 15, halves >> 4], axis=1).reshape(-1, 2)
    words: NDArray[np.uint32] = (weights[:, 0] | weights[:, 1] << 4).view(np.uint32)
    return words


def _float16(packed: Bytes) -> NDArray[np.float16]:
    return np.ascontiguousarray(packed).view(np.float16)


def _halves(values: NDArray[Any], rows: tuple[int, ...]) -> mx.array:
    return mx.array(values.astype(np.float16).reshape(*rows, -1))
