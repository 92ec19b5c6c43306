"""Samples tokens on the host: a sort of 16 rows of logits takes MLX 64 ms on a CPU."""

from collections.abc import Sequence
from math import log
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from batching.backend.sampling.seeds import applies_xtc
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
    if not params.temperature_last:
        logits = _heated(logits, params)
    highest = logits.max()
    if not np.isfinite(highest):
        return int(logits.argmax())
    weights = np.exp(logits - highest)
    kept = _kept(logits, weights, params, seed)
    left = _of(weights, kept)
    if params.temperature_last:
        heated = _heated(_of(logits, kept), params)
        left = np.exp(heated - heated.max())
    # A token's exponential time, with its weight as the rate, is the shortest with the token's probability.
    times = np.random.Generator(np.random.PCG64(seed)).standard_exponential(
        len(logits), dtype=np.float32
    )
    times += _SHORTEST
    winner = int((left / _of(times, kept)).argmax())
    return winner if kept is None else int(kept[winner])


def _heated(logits: Array, params: SamplingParams) -> Array:
    """Divide by the temperature, which can depend on the entropy; banned tokens do not count for that."""
    temperature = params.temperature
    if params.dynatemp_range > 0 and np.isfinite(highest := logits.max()):
        below = logits - highest
        number = max(2, int((below > NEVER / 2).sum()))
        part = min(max(_entropy(np.exp(below)) / log(number), 0.0), 1.0)
        low, high = max(temperature - params.dynatemp_range, 0), temperature + params.dynatemp_range
        temperature = max(low + (high - low) * part**params.dynatemp_exponent, MIN_TEMPERATURE)
    heated: Array = logits / np.float32(temperature)
    return heated


def _entropy(weights: Array) -> float:
    """Return the entropy, in nats, of probabilities that are proportional to these."""
    probabilities = weights[weights > 0] / weights.sum(dtype=np.float64)
    return float(-(probabilities * np.log(probabilities)).sum())


def _top_sigma(logits: Array, num_deviations: float) -> Array:
    """Mask what is further below the highest logit; masked ones and banned tokens do not count."""
    highest = logits.max()
    if not np.isfinite(highest):
        return logits
    allowed = logits[logits > highest + NEVER / 2]
    floor = highest - num_deviations * allowed.std(dtype=np.float64)
    return np.where(logits < floor, -np.inf, logits)


def _kept(logits: Array, weights: Array, params: SamplingParams, seed: int) -> Array | None:
    """Return the tokens from which one is drawn, in the order of their ids; None is all."""
    if params.typical_p < 1:
        kept = _top(logits, weights, params.top_k, 1.0)
        kept = _chosen(kept, _typical(_of(weights, kept), params.typical_p))
        kept = _chosen(kept, _top(logits[kept], weights[kept], 0, params.top_p))
    else:
        kept = _top(logits, weights, params.top_k, params.top_p)
    if params.min_p > 0:
        left = _of(weights, kept)
        kept = _chosen(kept, np.flatnonzero(left >= params.min_p * left.max()))
    if applies_xtc(params.xtc_probability, seed):
        kept = _chosen(kept, _no_top_choices(_of(weights, kept), params.xtc_threshold))
    return kept


def _of(values: Array, kept: Array | None) -> Array:
    return values if kept is None else values[kept]


def _chosen(kept: Array | None, indices: Array | None) -> Array | None:
    """Return those of the tokens that are at these indices; None is all."""
    if kept is None or indices is None:
        return indices if kept is None else kept
    return kept[indices]


def _top(logits: Array, weights: Array, top_k: int, top_p: float) -> Array | None:
    """Return the tokens within top-k and top-p, in the order of their ids; None is all."""
    vocab_size = len(logits)
    top_k = min(top_k or vocab_size, vocab_size)
    if top_k == vocab_size and top_p >= 1:
        return None
    total = weights.sum(dtype=np.float64)
    # Top-p is taken of what top-k left.
    for num in (_NUM_CANDIDATES, vocab_size) if top_k == vocab_size else (top_k,):
        order = largest(logits, num)
        cumulative = np.cumsum(weights[order], dtype=np.float64)
        if num == top_k:
            total = cumulative[-1]
        # Keep a token while those before it have not reached top-p; the first one always stays.
        num_kept = 1 + int(np.searchsorted(cumulative[:-1], top_p * total))
        if num_kept < num:
            break
    return np.sort(order[:num_kept])


def _typical(weights: Array, typical_p: float) -> Array:
    """Return the indices of the weights that are nearest to the entropy and reach `typical_p` together."""
    total = weights.sum(dtype=np.float64)
    possible = np.flatnonzero(weights > 0)
    distance = np.abs(-np.log(weights[possible] / total) - _entropy(weights))
    order = possible[np.argsort(distance, kind="stable")]
    cumulative = np.cumsum(weights[order], dtype=np.float64)
    return np.sort(order[: 1 + int(np.searchsorted(cumulative[:-1], typical_p * total))])


def _no_top_choices(weights: Array, threshold: float) -> Array:
    """Return the indices without those that reach the threshold, but the least probable of these."""
    reaches = weights >= threshold * weights.sum(dtype=np.float64)
    lowest = weights[reaches].min(initial=np.inf)
    return np.flatnonzero(~reaches | (weights <= lowest))


def largest(logits: Array, num: int) -> Array:
    """Return the ids of the `num` largest logits, descending; of equal ones the first come first."""
    num = min(num, len(logits))
    if num < len(logits):
        threshold = np.partition(logits, len(logits) - num)[len(logits) - num]
        candidates = np.flatnonzero(logits >= threshold)
    else:
        candidates = np.arange(len(logits))
    return candidates[np.argsort(-logits[candidates], kind="stable")][:num]
