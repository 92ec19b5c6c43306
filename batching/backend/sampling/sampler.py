"""Samples one token for each row of logits, whatever mixture of parameters the rows have."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol
from weakref import WeakKeyDictionary

import mlx.core as mx

from batching.backend.host_array import host_array
from batching.backend.sampling.edits import (
    NO_EDITS,
    Edits,
    TokenCounts,
    edited,
    penalties,
    with_bias,
)
from batching.backend.sampling.expected_tokens import SampledTokens
from batching.backend.sampling.host_draw import MIN_TEMPERATURE, NEVER, draw
from batching.backend.sampling.logit_rows import Sample
from batching.inputs.sampling_params import SamplingParams
from batching.steps.sequences import SequenceState

_MASK_64: Final = (1 << 64) - 1


def draw_seed(seed: int, position: int) -> int:
    """Return the 64-bit seed with which one position of one request is sampled.

    splitmix64 (Steele, Lea, Flood 2014) over seed and position.  No state: neighbours,
    preemption and batching cannot change a sampled token.
    """
    return _splitmix(_splitmix(seed & _MASK_64) ^ position)


def _splitmix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return state ^ (state >> 31)


class Masks(Protocol):
    """Masks out the tokens that constraints forbid; see `batching.backend.sampling.token_masks`."""

    def apply(self, logits: mx.array) -> mx.array: ...


class Sampler:
    """Samples all rows of a step at once; a row costs only what its parameters need.

    Order of operations: penalties and bias, masks, top-n-sigma, temperature, top-k, top-p, min-p,
    sampling.  Greedy rows take the arg-max of the logits after penalties, bias and masks.

    Every token of the vocabulary gets a random number, and the token with the largest product of that
    number and its probability is sampled (the Gumbel-max trick, Yellott 1977).  Rounding, which differs
    between batches, then matters only if two products are nearly equal; with inverse-CDF sampling it
    would shift the outcome for all later tokens.
    """

    def __init__(
        self,
        draw: "Draw | None" = None,
        arg_max: "ArgMax | None" = None,
    ) -> None:
        """Make a sampler; without arguments it samples on the device of the logits, on a CPU with numpy."""
        self._draw = draw or (draw_on_host if mx.default_device() == mx.cpu else draw_on_device)
        self.waits_for_logits: Final = self._draw is draw_on_host
        self._arg_max = arg_max or plain_arg_max
        self._counts: WeakKeyDictionary[SequenceState, TokenCounts] = WeakKeyDictionary()

    def sample(
        self,
        logits: mx.array,
        samples: Sequence[Sample],
        sequences: Mapping[int, SequenceState],
        masks: "Masks | None" = None,
        expected: SampledTokens | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Return the sampled token ids, uint32 `[S]`, and their logits.

        If the logits of a row are not finite, a token is returned nevertheless; the runner checks its logit.

        logits: `[S, vocab_size]`, one row for each sample.
        sequences: those of the samples, by their ids.
        expected: the tokens that the step in flight samples, if sequences wait for some.
        """
        states = [sequences[sample.sequence_id] for sample in samples]
        pairs = list(zip(samples, states, strict=True))
        edits = [self._edits(sample, state, expected) for sample, state in pairs]
        is_greedy = all(state.sampling.temperature < MIN_TEMPERATURE for state in states)
        if is_greedy and not any(edits) and masks is None:
            return self._arg_max(logits)
        given, logits = logits, logits.astype(mx.float32)
        if masks is not None:
            # Masked rows expect no token, and what the others do is known where they are drawn.
            later = [edit if edit is not None and edit.expected else None for edit in edits]
            now = [None if edit is not None and edit.expected else edit for edit in edits]
            logits, edits = masks.apply(edited(logits, now)), later
        seeds = [draw_seed(state.seed, sample.position) for sample, state in pairs]
        params = [state.sampling for state in states]
        before = None if expected is None else expected.tokens
        tokens = self._draw(logits, params, seeds, edits, before)
        return tokens, _chosen(given, tokens)

    def _edits(
        self, sample: Sample, state: SequenceState, expected: SampledTokens | None
    ) -> Edits | None:
        params, banned = state.sampling, set(_banned(sample, state))
        if not (params.has_penalties or params.logit_bias or banned):
            return None
        edits = NO_EDITS
        if params.has_penalties:
            row = None
            if expected is not None and sample.expects_token:
                row = expected.indices[sample.sequence_id]
            edits = penalties(params, self._counted(sample, state), row)
        if params.logit_bias or banned:
            edits = with_bias(edits, dict(params.logit_bias), banned)
        return edits

    def _counted(self, sample: Sample, state: SequenceState) -> TokenCounts:
        """Return how often each token occurs in the output before a sample."""
        counts = self._counts.get(state)
        if counts is None:
            counts = self._counts[state] = TokenCounts(state)
        counts.catch_up(state)
        return counts.followed_by(sample.drafts) if sample.drafts else counts


def _chosen(logits: mx.array, tokens: mx.array) -> mx.array:
    return mx.take_along_axis(logits, tokens[:, None], axis=-1).squeeze(1)


def _banned(sample: Sample, state: SequenceState) -> Iterable[int]:
    """Yield the tokens that would end the output too early, or complete a bad word."""
    params = state.sampling
    if sample.position - state.num_prompt_tokens < params.min_tokens:
        yield from state.spec.stop_token_ids
    for *beginning, last in params.bad_words:
        start = sample.position - len(beginning)
        tokens = [*state.token_ids[start:], *sample.drafts][-len(beginning) :]
        if start >= state.num_prompt_tokens and (not beginning or tokens == beginning):
            yield last


ArgMax = Callable[[mx.array], tuple[mx.array, mx.array]]


def plain_arg_max(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Return the index of the highest of each row of `[S, vocab_size]`, uint32, and that number."""
    tokens = mx.argmax(logits, axis=-1)
    return tokens, _chosen(logits, tokens)


# From logits `[S, vocab_size]`, what each row asks for, its seed and edits, and the tokens of the step
# in flight, if edits depend on these: token ids, uint32 `[S]`.
Draw = Callable[
    [mx.array, Sequence[SamplingParams], Sequence[int], Sequence[Edits | None], mx.array | None],
    mx.array,
]


def draw_on_host(
    logits: mx.array,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    edits: Sequence[Edits | None],
    before: mx.array | None = None,
) -> mx.array:
    logits = edited(logits, edits, before)
    return mx.array(draw(host_array(logits), params, seeds), dtype=mx.uint32)


def draw_on_device(
    logits: mx.array,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    edits: Sequence[Edits | None],
    before: mx.array | None = None,
) -> mx.array:
    logits = edited(logits, edits, before)
    tokens = mx.argmax(logits, axis=-1)
    if sampled := [row for row, p in enumerate(params) if p.temperature >= MIN_TEMPERATURE]:
        rows = mx.array(sampled)
        of_rows = [params[row] for row in sampled], [seeds[row] for row in sampled]
        tokens[rows] = _race(logits[rows], *of_rows)
    return tokens


def _race(logits: mx.array, params: Sequence[SamplingParams], seeds: Sequence[int]) -> mx.array:
    if any(p.top_n_sigma > 0 for p in params):
        logits = _keep_top_sigma(logits, params)
    logits = logits / _column([p.temperature for p in params])
    logits = _keep_top(logits, params)
    if any(p.min_p > 0 for p in params):
        floor = mx.log(_column([p.min_p for p in params])) + logits.max(axis=-1, keepdims=True)
        logits = mx.where(logits < floor, -mx.inf, logits)
    size = logits.shape[-1:]
    noise = mx.stack([mx.random.gumbel(size, key=mx.random.key(seed)) for seed in seeds])
    return mx.argmax(logits + noise, axis=-1)


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


def _keep_top(logits: mx.array, params: Sequence[SamplingParams]) -> mx.array:
    """Mask what top-k and top-p leave out, in the rows that ask for it: these are sorted."""
    asking = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
    if not asking:
        return logits
    rows, vocab_size = mx.array(asking), logits.shape[-1]
    params = [params[row] for row in asking]
    part = logits[rows]
    order = mx.argsort(-part, axis=-1)
    descending = mx.take_along_axis(part, order, axis=-1)
    top_k = _column([min(p.top_k or vocab_size, vocab_size) for p in params])
    ranks = mx.arange(vocab_size)
    within_k = ranks < top_k
    descending = mx.where(within_k, descending, -mx.inf)
    probabilities = mx.softmax(descending, axis=-1, precise=True)
    # Keep a token while those before it have not reached top_p; the first one always stays.
    before = mx.cumsum(probabilities, axis=-1) - probabilities
    kept = within_k & ((before < _column([p.top_p for p in params])) | (ranks == 0))
    # By rank and not by a threshold: of equal logits only as many stay as there is room for.
    ranked = mx.where(kept, descending, -mx.inf)
    logits[rows] = mx.put_along_axis(part, order, ranked, axis=-1)
    return logits


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(list(values), dtype=mx.float32)[:, None]
