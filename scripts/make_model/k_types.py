"""Random blocks of GGUF's K types, and which tensors of a Q4_K_M file have which.

A block has 256 weights, in groups whose scales are integers times a number of the block.
"""

import math
import re
from typing import Final

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

BLOCK: Final = 256
MIX: Final = "q4_k_m"
_UNEVEN: Final = "q8_0"
# Standard deviations of the integers from 0 to 15 and from 0 to 63.
_SPREADS: Final = {"q4_k": math.sqrt((16**2 - 1) / 12), "q6_k": math.sqrt((64**2 - 1) / 12)}


def type_in_mix(name: str, num_layers: int, length: int, *, is_tied: bool) -> str:
    """Return the type of a matrix: more bits where llama.cpp's quantizer takes them.

    These are the output matrix and, in the first and the last eighth of the layers and every third between,
    what is attended to and the MLP's last product.
    """
    if length % BLOCK:
        return _UNEVEN
    if name.endswith("embed_tokens.weight" if is_tied else "lm_head.weight"):
        return "q6_k"
    layer = re.search(r"layers\.(\d+)\..*(v_proj|down_proj)\b", name)
    if layer is None:
        return "q4_k"
    index, eighth = int(layer[1]), num_layers // 8
    has_more = index < eighth or index >= 7 * num_layers // 8 or (index - eighth) % 3 == 2
    return "q6_k" if has_more else "q4_k"


def k_blocks(kind: str, deviation: float, count: int, rng: np.random.Generator) -> Bytes:
    """Return blocks whose weights have a standard deviation, and a mean of 0."""
    of_block = (deviation / _SPREADS[kind] / 56 * rng.uniform(0.75, 1.25, (count, 1))).astype(
        np.float16
    )
    # Around 56 on average, of up to 63 in Q4_K.
    scales = rng.integers(49, 64, (count, 16 if kind == "q6_k" else 8), np.uint8)
    stored = rng.integers(0, 256, (count, 192 if kind == "q6_k" else 128), np.uint8)
    if kind == "q6_k":
        # Integers from -32 to 31 have a mean of 0 if scales have either sign.
        signed = np.where(rng.random(scales.shape) < 0.5, scales, -scales.astype(np.int8))
        return np.concatenate([stored, signed.astype(np.uint8), of_block.view(np.uint8)], axis=1)
    # Minima are the scales times 7.5.
    first, last = scales[:, :4], scales[:, 4:]
    low, high = first | last >> 4 << 6, (last & 15) * np.uint8(17)
    of_minima = (7.5 * of_block).astype(np.float16)
    parts = of_block.view(np.uint8), of_minima.view(np.uint8), low, low, high, stored
    return np.concatenate(parts, axis=1)
