"""Where the end of a sequence has occurred before in it, for the penalty DRY."""

from collections.abc import Sequence
from copy import copy
from math import ceil, log
from typing import Final

import numpy as np
from numpy.typing import NDArray

from batching.backend.sampling.host_draw import NEVER
from batching.inputs.sampling_params import DryParams

IntArray = NDArray[np.int64]

# A penalty that grows so slowly that this many tokens do not make it a ban grows no further.
MAX_GROWTH: Final = 128


class Repetitions:
    """How many of the last tokens of a sequence agree with those up to each position before.

    A token that is appended costs one pass of numpy over the window.  Only the first matches are found token
    by token, as far back as one reaches that matters.
    """

    def __init__(self, dry: DryParams, tokens: Sequence[int]) -> None:
        self._dry = dry
        self._growth = _growth(dry)
        # The last one is for all tokens behind it.
        self._is_breaker = np.zeros(max(dry.breakers, default=-1) + 2, bool)
        self._is_breaker[[*dry.breakers]] = True
        self._sequences: dict[int, list[list[int]]] = {}
        for *beginning, last in dry.breaker_sequences:
            self._sequences.setdefault(last, []).append(beginning)
        self._num_seen = len(tokens)
        # Those of the window.
        self._tokens: IntArray = np.array(tokens, np.int64)[-(dry.last_n or len(tokens)) :]
        # A longer match has the same penalty.
        longest = dry.allowed_length + self._growth
        # How many tokens follow the last breaker.
        self._num_unbroken = self._first_unbroken(longest)
        # One for each token of the window but the last.
        self._matches = _first_matches(self._tokens, longest)

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Append the tokens of the sequence that are new."""
        self._append(tokens[self._num_seen :])

    def followed_by(self, tokens: Sequence[int]) -> "Repetitions":
        """Return the repetitions with these tokens at the end."""
        longer = copy(self)
        longer._append(tokens)
        return longer

    def penalties(self) -> tuple[IntArray, NDArray[np.float64]]:
        """Return the tokens that would go on with a repetition, distinct, and what is added to their logits."""
        allowed, num = self._dry.allowed_length, len(self._matches)
        if self._num_unbroken < allowed:
            return np.empty(0, np.int64), np.empty(0)
        # A match ends where the window begins.
        longest = np.minimum(np.arange(1, num + 1), self._num_unbroken)
        lengths = np.minimum(self._matches, longest)
        ends = np.flatnonzero(lengths >= allowed)
        # Sorted, the longest match of each token is its last.
        keys = np.sort(self._tokens[ends + 1] << 32 | lengths[ends])
        keys = keys[np.append(keys[1:] >> 32 != keys[:-1] >> 32, True)[: len(keys)]]
        keys = keys[~self._is_breaker[np.minimum(keys >> 32, len(self._is_breaker) - 1)]]
        exponents = np.minimum((keys & 0xFFFFFFFF) - allowed, self._growth)
        logarithms = log(self._dry.multiplier) + exponents * log(self._dry.base)
        return keys >> 32, -np.exp(np.minimum(logarithms, log(-NEVER)))

    def _append(self, tokens: Sequence[int]) -> None:
        self._num_seen += len(tokens)
        for token in tokens:
            goes_on = self._tokens == token
            self._matches = np.where(goes_on, np.append(0, self._matches) + 1, 0)
            self._tokens = np.append(self._tokens, token)
            if self._dry.last_n is not None:
                self._tokens = self._tokens[-self._dry.last_n :]
                self._matches = self._matches[len(self._matches) - len(self._tokens) + 1 :]
            is_break = self._is_break(len(self._tokens))
            self._num_unbroken = 0 if is_break else self._num_unbroken + 1

    def _first_unbroken(self, longest: int) -> int:
        num_tokens = len(self._tokens)
        most = min(num_tokens, longest)
        return next((n for n in range(most) if self._is_break(num_tokens - n)), most)

    def _is_break(self, stop: int) -> bool:
        """Return whether the tokens of the window before `stop` end with a breaker."""
        last = int(self._tokens[stop - 1])
        if self._is_breaker[min(last, len(self._is_breaker) - 1)]:
            return True
        return any(
            self._tokens[max(0, stop - 1 - len(beginning)) : stop - 1].tolist() == beginning
            for beginning in self._sequences.get(last, ())
        )


def _growth(dry: DryParams) -> int:
    """Return from which exponent on the penalty grows no further."""
    if dry.base <= 1:
        return 0
    return min(MAX_GROWTH, max(0, ceil((log(-NEVER) - log(dry.multiplier)) / log(dry.base))))


def _first_matches(tokens: IntArray, longest: int) -> IntArray:
    """Return how many tokens up to each but the last agree with the last ones, up to `longest`."""
    last = len(tokens) - 1
    matches = np.zeros(last, np.int64)
    ends = np.arange(last)
    for length in range(min(last, longest)):
        ends = ends[ends >= length]
        ends = ends[tokens[ends - length] == tokens[last - length]]
        if not len(ends):
            break
        matches[ends] = length + 1
    return matches
