"""Random weights, made as they are stored: nothing is quantized.

Matrices have a standard deviation of 1 / sqrt(inputs), embeddings half of that, and the last norm
makes up for it: logits then spread by 2, so that greedy decoding has a choice and no token is sure.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from statistics import NormalDist
from typing import Any, Final, NamedTuple

import mlx.core as mx
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from scripts.make_model import k_types

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Shape = tuple[int, ...]

BLOCK: Final = 32
# Weights that are made at once, which bounds the memory for them.
_AT_ONCE: Final = 1 << 25
_EMBEDDING_GAIN: Final = 0.5
_LOGIT_SPREAD: Final = 2.0
# The recurrence forgets between a hundredth and a seventh of its state with each token.
_STEP_BIAS: Final = -4.6
_MAX_DECAY: Final = 16.0

_BYTES: Final = np.arange(256)
# Four bits stand for -8 to 7: without -8 the mean is 0, or all weights together would be one large
# direction that grows from layer to layer.
_NIBBLES: Final = (
    np.where(_BYTES % 16, _BYTES % 16, 8) | np.where(_BYTES // 16, _BYTES // 16, 8) << 4
)
_SIGNED: Final = np.where(_BYTES == 128, 0, _BYTES)


class Kind(NamedTuple):
    """A quantization: blocks of 32 weights with a scale before them.

    spread: the standard deviation of what the table's bytes stand for.
    zero: what is stored for 0.
    """

    bits: int
    table: NDArray[np.int64]
    spread: float
    zero: int = 0

    @property
    def mode(self) -> str:
        return "affine" if self.zero else "mxfp4"


_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
KINDS: Final = {
    "q4_0": Kind(4, _NIBBLES, float(np.std(_NIBBLES % 16 - 8)), 8),
    "q8_0": Kind(8, _SIGNED, float(np.std(_SIGNED.astype(np.int8))), 128),
    "mxfp4": Kind(4, _BYTES, math.sqrt(sum(x * x for x in _E2M1) / len(_E2M1))),
}
QUANTIZATIONS: Final = (*KINDS, "bf16")


def ggml_type(quantization: str) -> GGMLQuantizationType:
    return GGMLQuantizationType[quantization.upper()]


def num_bytes(quantization: str, shape: Shape) -> int:
    block, of_block = GGML_QUANT_SIZES[ggml_type(quantization)]
    return math.prod(shape) // block * of_block


def matrix(quantization: str, name: str, shape: Shape, rng: np.random.Generator) -> Iterator[Bytes]:
    """Yield a GGUF tensor's bytes in pieces, a row for each block."""
    gain = _EMBEDDING_GAIN if "embed_tokens" in name or "lm_head" in name else 1.0
    deviation = gain / math.sqrt(shape[-1])
    make = _bfloat16(deviation) if quantization == "bf16" else _blocks(quantization, deviation)
    block = k_types.BLOCK if quantization.endswith("_k") else BLOCK
    count = math.prod(shape) // block
    for start in range(0, count, _AT_ONCE // block):
        yield make(min(count - start, _AT_ONCE // block), rng)


Make = Callable[[int, np.random.Generator], Bytes]


def _blocks(quantization: str, deviation: float) -> Make:
    if quantization.endswith("_k"):
        return partial(k_types.k_blocks, quantization, deviation)
    kind = KINDS[quantization]
    table = kind.table.astype(np.uint8)
    step = deviation / kind.spread

    def make(count: int, rng: np.random.Generator) -> Bytes:
        scales = _scales(step, count, rng) if kind.zero else _exponents(step, count, rng)
        stored = rng.integers(0, 256, (count, kind.bits * BLOCK // 8), np.uint8)
        return np.concatenate([scales, table[stored]], axis=1)

    return make


def _scales(step: float, count: int, rng: np.random.Generator) -> Bytes:
    return (step * rng.uniform(0.75, 1.25, (count, 1))).astype(np.float16).view(np.uint8)


def _exponents(step: float, count: int, rng: np.random.Generator) -> Bytes:
    """Mix the powers of two below and above the step so that the weights' variance is right."""
    power = math.floor(math.log2(step))
    share = (step**2 / 4.0**power - 1) / 3
    return (127 + power + (rng.random((count, 1)) < share)).astype(np.uint8)


def _bfloat16(deviation: float) -> Make:
    normal = NormalDist(0, deviation)
    quantiles = np.array([normal.inv_cdf((i + 0.5) / 65536) for i in range(65536)], np.float32)
    table = (quantiles.view(np.uint32) >> 16).astype(np.uint16)

    def make(count: int, rng: np.random.Generator) -> Bytes:
        weights = table[rng.integers(0, 65536, (count, BLOCK), np.uint16)]
        return np.frombuffer(weights, np.uint8).reshape(count, -1)

    return make


def mlx_parts(quantization: str, shape: Shape, pieces: Iterator[Bytes]) -> dict[str, mx.array]:
    """Return the blocks as MLX has them: weights, scales, and what is stored for 0 as a bias."""
    blocks = np.concatenate(list(pieces))
    rows = (*shape[:-1], -1)
    if quantization == "bf16":
        return {"weight": mx.array(blocks.view(np.uint16).reshape(shape)).view(mx.bfloat16)}
    kind = KINDS[quantization]
    split = blocks.shape[1] - kind.bits * BLOCK // 8
    stored = np.ascontiguousarray(blocks[:, split:])
    if kind.bits == 8:
        stored ^= np.uint8(128)
    parts = {"weight": mx.array(stored.view(np.uint32).reshape(rows))}
    first = np.ascontiguousarray(blocks[:, :split])
    if not kind.zero:
        return parts | {"scales": mx.array(first.reshape(rows))}
    scales = mx.array(first.view(np.float16).reshape(rows)).astype(mx.bfloat16)
    return parts | {"scales": scales, "biases": -kind.zero * scales}


def floats(name: str, shape: Shape, rng: np.random.Generator) -> Floats:
    """Return what is never quantized: norms, biases, routers, convolutions, recurrences."""
    values: Any = rng.standard_normal(shape, np.float32)
    match name.rsplit(".", 2)[-2:]:
        case [_, "A_log"]:
            values = np.log(rng.uniform(1, _MAX_DECAY, shape))
        case [_, "dt_bias"]:
            values = np.full(shape, _STEP_BIAS)
        case [_, "bias"]:
            values *= 0.02
        case ["conv1d", _]:
            values /= math.sqrt(shape[1])
        case [_, "weight"] if len(shape) > 1:
            values /= math.sqrt(shape[-1])
        case [_, "weight"]:
            is_last = name.endswith("model.norm.weight")
            values = np.full(shape, _LOGIT_SPREAD / _EMBEDDING_GAIN if is_last else 1.0)
    return values.astype(np.float32)  # type: ignore[no-any-return]
