"""Samples one token for each row of logits, whatever mixture of parameters the rows have."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol
from weakref import WeakKeyDictionary

import mlx.core as mx

from batching.backend.host_array import host_array
from batching.backend.sampling.device_draw import race
from batching.backend.sampling.dry import Repetitions
from batching.backend.sampling.edits import (
    NO_EDITS,
    Edits,
    TokenCounts,
    edited,
    penalties,
    with_bias,
    with_terms,
)
from batching.backend.sampling.expected_tokens import SampledTokens
from batching.backend.sampling.host_draw import MIN_TEMPERATURE, draw
from batching.backend.sampling.logit_rows import Sample
from batching.backend.sampling.seeds import draw_seed
from batching.inputs.sampling_params import DryParams, SamplingParams
from batching.steps.sequences import SequenceState


class Masks(Protocol):
    """Masks out the tokens that constraints forbid; see `batching.backend.sampling.token_masks`."""

    def apply(self, logits: mx.array) -> mx.array: ...


class Sampler:
    """Samples all rows of a step at once; a row costs only what its parameters need.

    Order of operations: penalties, DRY and bias, masks, top-n-sigma, temperature, top-k, typical-p, top-p,
    min-p, XTC, the temperature of rows that have it last, sampling.  Greedy rows take the arg-max of the
    logits after penalties, bias and masks.

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
        self._repeated: WeakKeyDictionary[SequenceState, Repetitions] = WeakKeyDictionary()

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
        if not (params.has_penalties or params.dry or params.logit_bias or banned):
            return None
        edits = NO_EDITS
        if params.has_penalties:
            row = None
            if expected is not None and sample.expects_token:
                row = expected.indices[sample.sequence_id]
            edits = penalties(params, self._counted(sample, state), row)
        if params.dry is not None:
            edits = with_terms(edits, *self._repetitions(sample, state, params.dry).penalties())
        if params.logit_bias or banned:
            edits = with_bias(edits, dict(params.logit_bias), banned)
        return edits if len(edits.tokens) else None

    def _counted(self, sample: Sample, state: SequenceState) -> TokenCounts:
        """Return how often each token occurs in the output before a sample."""
        counts = self._counts.get(state)
        if counts is None:
            counts = self._counts[state] = TokenCounts(state)
        counts.catch_up(state)
        return counts.followed_by(sample.drafts) if sample.drafts else counts

    def _repetitions(self, sample: Sample, state: SequenceState, dry: DryParams) -> Repetitions:
        """Return where the tokens before a sample have occurred before."""
        found = self._repeated.get(state)
        if found is None:
            found = self._repeated[state] = Repetitions(dry, state.token_ids)
        found.catch_up(state.token_ids)
        return found.followed_by(sample.drafts) if sample.drafts else found


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
        tokens[rows] = race(logits[rows], *of_rows)
    return tokens
