"""Edits of single logits: penalties of tokens that occurred before, biases, and banned tokens."""

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from itertools import count
from typing import Final, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from batching.backend.sampling.host_draw import NEVER
from batching.inputs.sampling_params import SamplingParams
from batching.steps.sequences import SequenceState

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


class TokenCounts:
    """How often each token of a sequence occurs in its output, updated as the sequence grows.

    tokens: int `[n]`, distinct; those of the prompt are among them, too.
    times: float64 `[n]`.
    """

    def __init__(self, sequence: SequenceState) -> None:
        self._num_counted = sequence.num_prompt_tokens
        self.tokens: IntArray = np.empty(0, np.int64)
        self.times: FloatArray = np.empty(0)
        self._index: dict[int, int] = {}
        self._insert(sequence.token_ids[: self._num_counted])

    def catch_up(self, sequence: SequenceState) -> None:
        """Count the tokens that were not counted yet."""
        self._add(sequence.token_ids[self._num_counted :])
        self._num_counted = len(sequence.token_ids)

    def followed_by(self, tokens: Sequence[int]) -> "TokenCounts":
        """Return the counts with these tokens at the end of the output."""
        counts = copy(self)
        counts.times, counts._index = self.times.copy(), self._index.copy()
        counts._add(tokens)
        return counts

    def _add(self, tokens: Sequence[int]) -> None:
        self._insert(tokens)
        for token in tokens:
            self.times[self._index[token]] += 1

    def _insert(self, tokens: Sequence[int]) -> None:
        """Make room for the tokens that have not occurred before."""
        new = [token for token in dict.fromkeys(tokens) if token not in self._index]
        if new:
            self._index |= zip(new, count(len(self._index)))
            self.tokens = np.append(self.tokens, new)
            self.times = np.append(self.times, np.zeros(len(new)))


class ExpectedEdit(NamedTuple):
    """How edits change with the token before, which a step in flight samples.

    row: of that token among those of the step.
    factor, term: if it is none of the tokens that are edited already.
    factors, terms: float64 `[n]`, for each of those, if it is that one.
    """

    row: int
    factor: float
    term: float
    factors: FloatArray
    terms: FloatArray


class Edits(NamedTuple):
    """Changes of logits: x becomes x / factor + term if it is above 0, else x * factor + term.

    tokens: int `[n]`, distinct.  factor, term: float64 `[n]`.
    """

    tokens: IntArray
    factor: FloatArray
    term: FloatArray
    expected: ExpectedEdit | None = None


NO_EDITS: Final = Edits(np.empty(0, np.int64), np.empty(0), np.empty(0))


def penalties(params: SamplingParams, counts: TokenCounts, row: int | None = None) -> Edits:
    """Return the penalties of the tokens that have occurred.

    row: of the last token among those that a step in flight samples, if it is not known.
    """
    factor = np.full(len(counts.tokens), params.repetition_penalty)
    edits = Edits(counts.tokens, factor, _term(params, counts.times))
    if row is None:
        return edits
    first = float(_term(params, np.ones(1))[0])
    again = _term(params, counts.times + 1)
    return edits._replace(
        expected=ExpectedEdit(row, params.repetition_penalty, first, factor, again)
    )


def _term(params: SamplingParams, times: FloatArray) -> FloatArray:
    """Return what is added to the logits of tokens that occur so often in the output."""
    term: FloatArray = -params.frequency_penalty * times - params.presence_penalty * (times > 0)
    return term


def with_bias(edits: Edits, bias: Mapping[int, float], banned: Collection[int]) -> Edits:
    """Add the bias of tokens to edits; of the banned ones nothing else remains."""
    others = (bias.keys() | banned) - set(edits.tokens.tolist())
    tokens = np.append(edits.tokens, np.array([*others], np.int64))
    index = {token: i for i, token in enumerate(tokens.tolist())}
    never = [index[token] for token in banned]

    def changed(
        factors: FloatArray, terms: FloatArray, factor: float, term: float
    ) -> tuple[FloatArray, FloatArray]:
        """`factor` and `term` are those of tokens without penalties."""
        factors = np.append(factors, np.full(len(others), factor))
        terms = np.append(terms, np.full(len(others), term))
        for token, value in bias.items():
            terms[index[token]] += value
        factors[never], terms[never] = 1.0, NEVER
        return factors, terms

    expected = edits.expected
    if expected is not None:
        row, factor, term, factors, terms = expected
        expected = ExpectedEdit(row, factor, term, *changed(factors, terms, factor, term))
    return Edits(tokens, *changed(edits.factor, edits.term, 1.0, 0.0), expected)


def with_terms(edits: Edits, tokens: IntArray, terms: FloatArray) -> Edits:
    """Add terms to the logits of distinct tokens; the token before is known."""
    merged, index = np.unique(np.append(edits.tokens, tokens), return_inverse=True)
    of_edits, of_terms = np.split(index, [len(edits.tokens)])
    factor, term = np.ones(len(merged)), np.zeros(len(merged))
    factor[of_edits], term[of_edits] = edits.factor, edits.term
    term[of_terms] += terms
    return Edits(merged, factor, term)


def edited(
    logits: mx.array, edits: Sequence[Edits | None], before: mx.array | None = None
) -> mx.array:
    """Return logits `[S, vocab_size]` with the edits of each row, lazily.

    before: the tokens that the step in flight samples, uint32 `[B]`, if edits depend on these.
    """
    present = [(row, edit) for row, edit in enumerate(edits) if edit is not None]
    if not present:
        return logits
    rows = np.repeat([row for row, _ in present], [len(edit.tokens) for _, edit in present])
    tokens, factor, term = map(np.concatenate, zip(*(edit[:3] for _, edit in present), strict=True))
    if tokens.min() < 0 or tokens.max() >= logits.shape[-1]:
        # MLX does not check whether an index is within an array.
        raise IndexError("a token id is not in the vocabulary")
    where = mx.array(rows.astype(np.int32)), mx.array(tokens.astype(np.int32))
    changed = _changed(logits[where], mx.array(_changes(factor, term)))
    expecting = [(row, edit, edit.expected) for row, edit in present if edit.expected is not None]
    if not expecting:
        logits[where] = changed
        return logits
    assert before is not None, "nothing samples the tokens"
    sampled, changes = _of_expected([each[1:] for each in expecting], before)
    last = mx.array([row for row, *_ in expecting]), sampled
    # It may be one of the others, and then counts once more: this comes from the logits as they were.
    again = _changed(logits[last], changes)
    logits[where] = changed
    logits[last] = again
    return logits


def _of_expected(
    edits: Sequence[tuple[Edits, ExpectedEdit]], before: mx.array
) -> tuple[mx.array, mx.array]:
    """Return the tokens that are expected, int32 `[R]`, and the changes of their logits, float32 `[3, R]`.

    Each is looked up among the tokens of its row, behind the change for one that is none of them.
    """
    width = 1 + max(len(edit.tokens) for edit, _ in edits)
    tokens = np.full((len(edits), width), -1, np.int32)
    changes = np.zeros((3, len(edits), width), np.float32)
    for row, (edit, expected) in enumerate(edits):
        stop = 1 + len(edit.tokens)
        tokens[row, 1:stop] = edit.tokens
        changes[:, row, :stop] = _changes(
            np.append(expected.factor, expected.factors), np.append(expected.term, expected.terms)
        )
    rows = mx.array([expected.row for _, expected in edits])
    sampled = before[rows].astype(mx.int32)
    # The first of the largest: 0 if it is none of them.
    found = mx.argmax(mx.array(tokens) == sampled[:, None], axis=1)
    chosen = mx.take_along_axis(mx.array(changes), found[None, :, None], axis=2)
    return sampled, chosen.squeeze(2)


def _changes(factor: FloatArray, term: FloatArray) -> NDArray[np.float32]:
    """Return what a logit above 0 is multiplied by, and one below, and what is added: `[3, n]`."""
    return np.stack([1 / factor, factor, term]).astype(np.float32)


def _changed(logits: mx.array, changes: mx.array) -> mx.array:
    up, down, plus = changes
    return logits * mx.where(logits > 0, up, down) + plus
