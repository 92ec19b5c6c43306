"""Speculative decoding by prompt lookup: drafts the next tokens of a request from its earlier ones."""

from collections.abc import Sequence
from typing import Final

_NGRAM: Final = 3
_MAX_PAUSE: Final = 64


class PromptLookup:
    """Drafts for one request (prompt lookup decoding, Saxena 2023).

    If the last three tokens occurred before in the prompt or the output, the draft is what followed them
    there.  The model processes the draft in the same step as the pending token, and each draft token is
    compared with the token sampled at its position, so the output is the same with and without drafts,
    greedy or not.

    The length adapts to the acceptance of previous drafts: it doubles after a draft that was accepted
    whole, and is one more than the number accepted otherwise.  After drafts without any accepted token
    there is a pause, which doubles each time.
    """

    def __init__(self) -> None:
        # The position after the latest occurrence of each n-gram.
        self._next_position: dict[tuple[int, ...], int] = {}
        # The first two tokens of each n-gram.
        self._beginnings: set[tuple[int, ...]] = set()
        self._num_indexed = 0
        self._max_length = 2
        self._pause = 1
        self._resume_at = 0

    def draft(self, token_ids: Sequence[int], max_length: int) -> tuple[int, ...]:
        """Return up to `max_length` tokens that may follow `token_ids`; empty if there is no guess."""
        max_length = min(max_length, self._max_length)
        if max_length < 1 or len(token_ids) < max(_NGRAM, self._resume_at):
            return ()
        self._index(token_ids)
        position = self._next_position.get(tuple(token_ids[-_NGRAM:]))
        return () if position is None else tuple(token_ids[position : position + max_length])

    def may_draft(self, token_ids: Sequence[int]) -> bool:
        """Return whether there could be a draft when one more token is known, whichever it is."""
        num_tokens = len(token_ids) + 1
        if num_tokens < max(_NGRAM, self._resume_at):
            return False
        self._index(token_ids)
        last, before = tuple(token_ids[1 - _NGRAM :]), tuple(token_ids[-_NGRAM:-1])
        return last in self._beginnings or last == before

    def record(self, num_tokens: int, num_drafted: int, num_accepted: int) -> None:
        """Record how many draft tokens were accepted; the request has `num_tokens` tokens now."""
        if num_accepted == num_drafted:
            self._max_length *= 2
        else:
            self._max_length = num_accepted + 1
        if num_accepted:
            self._pause = 1
        else:
            self._pause = min(2 * self._pause, _MAX_PAUSE)
            self._resume_at = num_tokens + self._pause

    def _index(self, token_ids: Sequence[int]) -> None:
        """Index the new tokens without the last n-gram: nothing follows it yet."""
        for stop in range(max(self._num_indexed, _NGRAM), len(token_ids)):
            ngram = tuple(token_ids[stop - _NGRAM : stop])
            self._next_position[ngram] = stop
            self._beginnings.add(ngram[:-1])
        self._num_indexed = len(token_ids)
