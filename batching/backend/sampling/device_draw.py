"""Samples tokens on the device of the logits."""

from collections.abc import Sequence

import mlx.core as mx

from batching.backend.sampling.host_draw import MIN_TEMPERATURE, NEVER
from batching.backend.sampling.seeds import applies_xtc
from batching.inputs.sampling_params import SamplingParams


def race(logits: mx.array, params: Sequence[SamplingParams], seeds: Sequence[int]) -> mx.array:
    """Return a token for each row of `[R, vocab_size]`, sampled from its softmax: uint32 `[R]`."""
    if any(p.top_n_sigma > 0 for p in params):
        logits = _keep_top_sigma(logits, params)
    logits = _heated(logits, params, [not p.temperature_last for p in params])
    is_typical = [p.typical_p < 1 for p in params]
    # Top-p is taken of what they leave, in rows that ask for both.
    top_p = [1.0 if typical else p.top_p for typical, p in zip(is_typical, params, strict=True)]
    logits = _keep_top(logits, [p.top_k for p in params], top_p)
    if any(is_typical):
        logits = _keep_typical(logits, [p.typical_p for p in params])
        top_p = [p.top_p if typical else 1.0 for typical, p in zip(is_typical, params, strict=True)]
        logits = _keep_top(logits, [0] * len(params), top_p)
    if any(p.min_p > 0 for p in params):
        floor = mx.log(_column([p.min_p for p in params])) + logits.max(axis=-1, keepdims=True)
        logits = mx.where(logits < floor, -mx.inf, logits)
    pairs = zip(params, seeds, strict=True)
    if any(excluding := [applies_xtc(p.xtc_probability, seed) for p, seed in pairs]):
        logits = _without_top_choices(logits, params, excluding)
    if any(p.temperature_last for p in params):
        logits = _heated(logits, params, [p.temperature_last for p in params])
    size = logits.shape[-1:]
    noise = mx.stack([mx.random.gumbel(size, key=mx.random.key(seed)) for seed in seeds])
    return mx.argmax(logits + noise, axis=-1)


def _heated(
    logits: mx.array, params: Sequence[SamplingParams], applies: Sequence[bool]
) -> mx.array:
    """Divide by the temperature in the rows where it applies now."""
    pairs = list(zip(params, applies, strict=True))
    temperature = _column([p.temperature if now else 1.0 for p, now in pairs])
    if any(p.dynatemp_range > 0 and now for p, now in pairs):
        width = _column([p.dynatemp_range if now else 0.0 for p, now in pairs])
        power = _column([p.dynatemp_exponent for p in params])
        low = mx.maximum(temperature - width, 0.0)
        warmed = low + (temperature + width - low) * mx.power(_uncertainty(logits), power)
        temperature = mx.where(width > 0, mx.maximum(warmed, MIN_TEMPERATURE), temperature)
    return logits / temperature


def _uncertainty(logits: mx.array) -> mx.array:
    """Return the entropy of each row as a part of its maximum, `[R, 1]`; banned tokens do not count."""
    number = (logits > logits.max(axis=-1, keepdims=True) + NEVER / 2).sum(axis=-1, keepdims=True)
    probabilities, information = _information(logits)
    entropy = (probabilities * information).sum(axis=-1, keepdims=True)
    return mx.clip(entropy / mx.log(mx.maximum(number, 2)), 0.0, 1.0)


def _information(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Return the probability of each token and its negative logarithm, which is 0 for those without one."""
    logarithms = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    probabilities = mx.exp(logarithms)
    return probabilities, mx.where(probabilities > 0, -logarithms, 0.0)


def _keep_top_sigma(logits: mx.array, params: Sequence[SamplingParams]) -> mx.array:
    """Mask what top-n-sigma leaves out; masked logits and banned tokens do not count."""
    highest = logits.max(axis=-1, keepdims=True)
    allowed = logits > highest + NEVER / 2
    below = mx.where(allowed, logits - highest, 0.0)
    number = allowed.sum(axis=-1, keepdims=True)
    mean = below.sum(axis=-1, keepdims=True) / number
    square = mx.where(allowed, mx.square(below - mean), 0.0).sum(axis=-1, keepdims=True) / number
    num_deviations = _column([p.top_n_sigma for p in params])
    floor = highest - num_deviations * mx.sqrt(square)
    return mx.where((num_deviations > 0) & (logits < floor), -mx.inf, logits)


def _keep_top(logits: mx.array, top_k: Sequence[int], top_p: Sequence[float]) -> mx.array:
    """Mask what top-k and top-p leave out, in the rows that ask for it: these are sorted."""
    asking = [row for row in range(len(logits)) if top_k[row] > 0 or top_p[row] < 1]
    if not asking:
        return logits
    rows, vocab_size = mx.array(asking), logits.shape[-1]
    part = logits[rows]
    order = mx.argsort(-part, axis=-1)
    descending = mx.take_along_axis(part, order, axis=-1)
    most = _column([min(top_k[row] or vocab_size, vocab_size) for row in asking])
    ranks = mx.arange(vocab_size)
    within_k = ranks < most
    descending = mx.where(within_k, descending, -mx.inf)
    probabilities = mx.softmax(descending, axis=-1, precise=True)
    # Keep a token while those before it have not reached top_p; the first one always stays.
    before = mx.cumsum(probabilities, axis=-1) - probabilities
    kept = within_k & ((before < _column([top_p[row] for row in asking])) | (ranks == 0))
    # By rank and not by a threshold: of equal logits only as many stay as there is room for.
    ranked = mx.where(kept, descending, -mx.inf)
    logits[rows] = mx.put_along_axis(part, order, ranked, axis=-1)
    return logits


def _keep_typical(logits: mx.array, typical_p: Sequence[float]) -> mx.array:
    """Mask what is further from the entropy than tokens that reach `typical_p`, where it is below 1."""
    asking = [row for row, p in enumerate(typical_p) if p < 1]
    rows = mx.array(asking)
    part = logits[rows]
    probabilities, information = _information(part)
    entropy = (probabilities * information).sum(axis=-1, keepdims=True)
    distance = mx.where(probabilities > 0, mx.abs(information - entropy), mx.inf)
    order = mx.argsort(distance, axis=-1)
    nearest = mx.take_along_axis(probabilities, order, axis=-1)
    before = mx.cumsum(nearest, axis=-1) - nearest
    limit = _column([typical_p[row] for row in asking])
    kept = (before < limit) | (mx.arange(logits.shape[-1]) == 0)
    ranked = mx.where(kept, mx.take_along_axis(part, order, axis=-1), -mx.inf)
    logits[rows] = mx.put_along_axis(part, order, ranked, axis=-1)
    return logits


def _without_top_choices(
    logits: mx.array, params: Sequence[SamplingParams], excluding: Sequence[bool]
) -> mx.array:
    """Mask the tokens that reach the threshold but the least probable of these, in some rows."""
    # No probability reaches 2.
    pairs = zip(params, excluding, strict=True)
    threshold = _column([p.xtc_threshold if now else 2.0 for p, now in pairs])
    reaches = mx.softmax(logits, axis=-1, precise=True) >= threshold
    lowest = mx.where(reaches, logits, mx.inf).min(axis=-1, keepdims=True)
    return mx.where(reaches & (logits > lowest), -mx.inf, logits)


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(list(values), dtype=mx.float32)[:, None]
