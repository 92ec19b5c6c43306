"""ggml's blocks of quantized weights, taken apart.

A block of most types has groups of weights with one scale and one bias: a weight is
scale x stored + bias.  Each function takes blocks as rows of bytes.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

# The values of IQ4_NL and IQ4_XS, and 128.
_IQ4_VALUES: Final[Bytes] = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
).astype(np.uint8) ^ np.uint8(128)
_NIBBLE: Final = np.uint8(4)


class Groups(NamedTuple):
    """Weights as stored, a row each block, and the scales of groups: numbers, or exponents."""

    weights: Bytes
    scales: NDArray[Any]
    biases: Floats | None


def _q4_0(blocks: Bytes) -> Groups:
    scale = _halves(blocks[:, :2])
    return Groups(_nibbles(blocks[:, 2:]), scale, -8 * scale)


def _q4_1(blocks: Bytes) -> Groups:
    return Groups(_nibbles(blocks[:, 4:]), _halves(blocks[:, :2]), _halves(blocks[:, 2:4]))


def _q5_0(blocks: Bytes) -> Groups:
    scale = _halves(blocks[:, :2])
    return Groups(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), scale, -16 * scale)


def _q5_1(blocks: Bytes) -> Groups:
    stored = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return Groups(stored, _halves(blocks[:, :2]), _halves(blocks[:, 2:4]))


def _q8_0(blocks: Bytes) -> Groups:
    scale = _halves(blocks[:, :2])
    return Groups(blocks[:, 2:] ^ np.uint8(128), scale, -128 * scale)


def _q4_k(blocks: Bytes) -> Groups:
    """256 weights in 8 groups: scale of the scales, scale of the minima, 12 bytes of both."""
    return Groups(_nibbles(blocks[:, 16:]), *_scales_of_8_groups(blocks))


def _q5_k(blocks: Bytes) -> Groups:
    # Bit i of byte j is the fifth of weight j of group i.
    high = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little").swapaxes(1, 2)
    stored = _nibbles(blocks[:, 48:]).reshape(high.shape) | high << _NIBBLE
    return Groups(stored, *_scales_of_8_groups(blocks))


def _q2_k(blocks: Bytes) -> Groups:
    """256 weights in 16 groups: a byte of scale and minimum each, the weights, and what these multiply."""
    of_scales, of_minima = _halves(blocks[:, 80:82]), _halves(blocks[:, 82:84])
    scales, minima = blocks[:, :16] & 15, blocks[:, :16] >> 4
    return Groups(_pairs_of_bits(blocks[:, 16:80]), of_scales * scales, -of_minima * minima)


def _q3_k(blocks: Bytes) -> Groups:
    """Third bits, then two of each weight, 16 scales of 6 bits, and what these multiply.

    Bit i of byte j is the third of weight j of the i-th 32; weights are from -4 on.
    """
    third = np.unpackbits(blocks[:, :32, None], axis=2, bitorder="little").swapaxes(1, 2)
    stored = _pairs_of_bits(blocks[:, 32:96]) | third.reshape(len(blocks), -1) << np.uint8(2)
    low = _nibbles(blocks[:, 96:104], 8)
    high = _pairs_of_bits(blocks[:, 104:108], 4)
    scales = _halves(blocks[:, 108:110]) * ((low | high << _NIBBLE).astype(np.float32) - 32)
    # 4 bits with 8 in the middle.
    return Groups(stored + np.uint8(4), scales, -8 * scales)


def _q6_k(blocks: Bytes) -> Groups:
    """Four bits of each weight, two more, 16 scales of 8 bits, and what these multiply."""
    low = _nibbles(blocks[:, :128], 64)
    stored = low | _pairs_of_bits(blocks[:, 128:192]) << _NIBBLE
    scales = _halves(blocks[:, 208:210]) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    # 8 bits with 128 in the middle, in place of 6 with 32.
    return Groups(stored + np.uint8(96), scales, -128 * scales)


def _scales_of_8_groups(blocks: Bytes) -> tuple[Floats, Floats]:
    of_scales, of_minima = _halves(blocks[:, 0:2]), _halves(blocks[:, 2:4])
    scales, minima = _unpack_scales(blocks[:, 4:16])
    return of_scales * scales, -of_minima * minima


def _unpack_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Split 12 bytes into 8 scales and 8 minima; the last four of each are in two places."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = [low & 63, (high & 15) | (low >> 6 << 4)]
    minima = [middle & 63, (high >> 4) | (middle >> 6 << 4)]
    return np.concatenate(scales, axis=1), np.concatenate(minima, axis=1)


def _iq4_nl(blocks: Bytes) -> Groups:
    scale = _halves(blocks[:, :2])
    return Groups(_iq4_values(blocks[:, 2:]), scale, -128 * scale)


def _iq4_xs(blocks: Bytes) -> Groups:
    """256 weights in 8 groups: a scale, then 2 and 4 bits of each group's own scale."""
    shifts = np.arange(0, 16, 2, dtype=np.uint16)
    high = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16) >> shifts & 3
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    scales = _halves(blocks[:, :2]) * ((low | high << 4).astype(np.float32) - 32)
    return Groups(_iq4_values(blocks[:, 8:]), scales, -128 * scales)


def _iq4_values(packed: Bytes) -> Bytes:
    return _IQ4_VALUES[_nibbles(packed, 16)]


def _of_grid(
    type_name: str, group_size: int, unit: float, scales_of: Callable[[Bytes], NDArray[Any]]
) -> Callable[[Bytes], Groups]:
    def groups_of(blocks: Bytes) -> Groups:
        """Weights are integers of a table times a scale, an odd multiple of the block's."""
        of_block = _split_scale(blocks) if type_name == "IQ1_M" else _halves(blocks[:, :2])
        scales: Floats = np.float32(unit) * of_block * (2 * scales_of(blocks) + 1)
        values: Floats = dequantize(blocks, GGMLQuantizationType[type_name])
        divisors = np.where(scales == 0, 1, scales)
        with np.errstate(invalid="ignore"):  # scales that are not finite
            integers = np.rint(values.reshape(*scales.shape, group_size) / divisors[..., None])
            stored = (integers + 128).astype(np.uint8)
        return Groups(stored.reshape(len(blocks), -1), scales, -128 * scales)

    return groups_of


def _split_scale(blocks: Bytes) -> Floats:
    """Join the four bits that each of four words has of a number."""
    words = _words(blocks[:, 48:56], np.uint16) >> 12 << np.arange(0, 16, 4, dtype=np.uint16)
    return np.bitwise_or.reduce(words, axis=1, keepdims=True).view(np.float16).astype(np.float32)


def _three_bits(blocks: Bytes) -> NDArray[Any]:
    words = _words(blocks[:, 48:56], np.uint16)
    shifts = np.arange(0, 12, 3, dtype=np.uint16)
    return (words[..., None] >> shifts & 7).reshape(len(blocks), -1)


def _ternary(type_name: str, scale_at: int) -> Callable[[Bytes], Groups]:
    def groups_of(blocks: Bytes) -> Groups:
        """256 weights of -1, 0 or 1 with one scale; MLX's largest groups are half of that."""
        scale = _halves(blocks[:, scale_at : scale_at + 2])
        values: Floats = dequantize(blocks, GGMLQuantizationType[type_name])
        stored = (np.sign(values) * np.sign(scale) + 1).astype(np.uint8)
        scales = np.repeat(scale, 2, axis=1)
        return Groups(stored, scales, -scales)

    return groups_of


def _exponents(group_size: int) -> Callable[[Bytes], Groups]:
    def groups_of(blocks: Bytes) -> Groups:
        """Exponents of the groups, then their weights; one group's fill whole bytes."""
        num_groups = 2 * blocks.shape[1] // (group_size + 2)
        exponents, packed = blocks[:, :num_groups], blocks[:, num_groups:]
        return Groups(_nibbles(packed, group_size // 2), exponents, None)

    return groups_of


def _nibbles(packed: Bytes, run: int = 0) -> Bytes:
    """Put weights in their order: `run` bytes hold as many in their low halves, then as many more."""
    run = run or min(packed.shape[1], 32)
    runs = packed.reshape(len(packed), -1, 1, run)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(len(packed), -1)


def _pairs_of_bits(packed: Bytes, run: int = 32) -> Bytes:
    """Put weights in their order: `run` bytes hold as many in their lowest bits, then as many more."""
    runs = packed.reshape(len(packed), -1, 1, run)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return (runs >> shifts & np.uint8(3)).reshape(len(packed), -1)


def _fifth_bits(packed: Bytes) -> Bytes:
    return np.unpackbits(packed, axis=1, bitorder="little") << _NIBBLE


def _words(packed: Bytes, kind: type[np.unsignedinteger[Any]]) -> NDArray[Any]:
    return np.ascontiguousarray(packed).view(kind)


def _halves(packed: Bytes) -> Floats:
    """Return the float16 numbers of each row."""
    return np.ascontiguousarray(packed).view(np.float16).astype(np.float32)


GROUPS_OF: Final[dict[str, Callable[[Bytes], Groups]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ1_S": _of_grid("IQ1_S", 32, 1 / 8, lambda b: _words(b[:, 34:50], np.uint16) >> 12 & 7),
    "IQ1_M": _of_grid("IQ1_M", 16, 1 / 8, _three_bits),
    "IQ2_XXS": _of_grid(
        "IQ2_XXS", 32, 1 / 8, lambda b: _words(b[:, 2:66], np.uint32)[:, 1::2] >> 28
    ),
    "IQ2_XS": _of_grid("IQ2_XS", 16, 1 / 8, lambda b: _nibbles(b[:, 66:74], 1)),
    "IQ2_S": _of_grid("IQ2_S", 16, 1 / 8, lambda b: _nibbles(b[:, 74:82], 1)),
    "IQ3_XXS": _of_grid("IQ3_XXS", 32, 1 / 4, lambda b: _words(b[:, 66:98], np.uint32) >> 28),
    "IQ3_S": _of_grid("IQ3_S", 32, 1, lambda b: _nibbles(b[:, 106:110], 1)),
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "TQ1_0": _ternary("TQ1_0", 52),
    "TQ2_0": _ternary("TQ2_0", 64),
    "MXFP4": _exponents(32),
    "NVFP4": _exponents(16),
}
