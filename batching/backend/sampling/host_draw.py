"""Samples tokens on the host: a sort of 16 rows of logits takes MLX 64 ms on a CPU."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from batching.inputs.sampling_params import SamplingParams

# Added to the logit of a token that must not follow.  Finite, so that a mask that leaves only
# such tokens decides.
NEVER: Final = -1e9

# Below it, dividing by the temperature overflows and the most probable token has all the mass.
MIN_TEMPERATURE: Final = 1e-5

# Top-p rarely reaches further down than this many tokens; where it does, all are sorted.
_NUM_CANDIDATES: Final = 1024

# Keeps a time of 0 from making a race of 0 / 0.
_SHORTEST: Final = np.float32(1e-30)

Array = npt.NDArray[Any]


def draw(logits: Array, params: Sequence[SamplingParams], seeds: Sequence[int]) -> list[int]:
    """Return a token for each row of `[R, vocab_size]`, sampled from its softmax."""
    return [_draw(*row) for row in zip(logits, params, seeds, strict=True)]


def _draw(logits: Array, params: SamplingParams, seed: int) -> int:
    if params.temperature < MIN_TEMPERATURE:
        return int(logits.argmax())
    if params.top_n_sigma > 0:
        logits = _top_sigma(logits, params.top_n_sigma)
    logits = logits / np.float32(params.temperature)
    highest = logits.max()
    if not np.isfinite(highest):
        return int(logits.argmax())
    weights = np.exp(logits - highest)
    kept = _top(logits, weights, params)
    if params.min_p > 0:
        tokens = np.arange(len(logits)) if kept is None else kept
        kept = tokens[weights[tokens] >= params.min_p]
    # A token's exponential time, with its weight as the rate, is the shortest with the token's probability.
    times = np.random.Generator(np.random.PCG64(seed)).standard_exponential(
        len(logits), dtype=np.float32
    )
    times += _SHORTEST
    if kept is None:
        return int((weights / times).argmax())
    return int(kept[(weights[kept] / times[kept]).argmax()])


def _top_sigma(logits: Array, num_deviations: float) -> Array:
    """Mask what is further below the highest logit; masked ones and banned tokens do not count."""
    highest = logits.max()
    if not np.isfinite(highest):
        return logits
    allowed = logits[logits > highest + NEVER / 2]
    floor = highest - num_deviations * allowed.std(dtype=np.float64)
    return np.where(logits < floor, -np.inf, logits)


def _top(logits: Array, weights: Array, params: SamplingParams) -> Array | None:
    """Return the tokens within top-k and top-p, in the order of their ids; None is all."""
    vocab_size = len(logits)
    top_k = min(params.top_k or vocab_size, vocab_size)
    if top_k == vocab_size and params.top_p >= 1:
        return None
    total = weights.sum(dtype=np.float64)
    # Top-p is taken of what top-k left.
    for num in (_NUM_CANDIDATES, vocab_size) if top_k == vocab_size else (top_k,):
        order = largest(logits, num)
        cumulative = np.cumsum(weights[order], dtype=np.float64)
        if num == top_k:
            total = cumulative[-1]
        # Keep a token while those before it have not reached top-p; the first one always stays.
        num_kept = 1 + int(np.searchsorted(cumulative[:-1], params.top_p * total))
        if num_kept < num:
            break
    return np.sort(order[:num_kept])


def largest(logits: Array, num: int) -> Array:
    """Return the ids of the `num` largest logits, descending; of equal ones the first come first."""
    num = min(num, len(logits))
    if num < len(logits):
        threshold = np.partition(logits, len(logits) - num)[len(logits) - num]
        candidates = np.flatnonzero(logits >= threshold)
    else:
        candidates = np.arange(len(logits))
    return candidates[np.argsort(-logits[candidates], kind="stable")][:num]
