"""A budget of tokens for thinking: when it is used up, the end of the thought is forced."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from batching.constraints.protocol import UNLIMITED, Constraint, MaskRow, TokenMatcher

# The bytes of a token; a part of a character only, perhaps.
TokenBytes = Callable[[int], bytes]

# What a thought after other text has at least.  With less, such text could not be drafted, nor planned a step
# ahead: each token of it might begin a thought that has to end at once.
LATE_TOKENS: Final = 16
# The most bytes that a character lacks, so no more tokens than that.
_MAX_MISSING: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingLimit:
    """How much a model may think, and how it writes that; texts are UTF-8.

    num_tokens: of all thoughts together, without the last token of each marker.
    start, ends: what begins a thought, and what ends one.
    closings: how the end is forced, by what is there of it already: its beginning, the longest first and the
        empty one last, and the tokens that follow.
    begun: what the prompt has of the message.
    is_first_only: what looks like a thought after other text is part of that text.
    """

    num_tokens: int
    start: bytes
    ends: tuple[bytes, ...]
    closings: tuple[tuple[bytes, tuple[int, ...]], ...]
    begun: bytes = b""
    is_first_only: bool = False


class ThinkingBudget:
    """A limit as a `Constraint`, around another one: two are equal if their limits and inner constraints are."""

    def __init__(
        self,
        limit: ThinkingLimit,
        inner: Constraint | None = None,
        token_bytes: TokenBytes | None = None,
    ) -> None:
        """token_bytes: of the model's tokens; None if the budget was read from bytes."""
        self.limit = limit
        self.inner = inner
        self._token_bytes = token_bytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ThinkingBudget) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        return f"ThinkingBudget({self.limit!r}, {self.inner!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Who reads it has the vocabulary.
        return ThinkingBudget, self._value

    def matcher(self) -> "ThinkingMatcher":
        assert self._token_bytes is not None, (
            "a budget that was read from bytes gets a vocabulary first"
        )
        inner = None if self.inner is None else self.inner.matcher()
        return ThinkingMatcher(self.limit, inner, self._token_bytes)

    @property
    def _value(self) -> tuple[ThinkingLimit, Constraint | None]:
        return self.limit, self.inner


class ThinkingMatcher:
    """Reads the text of one output as the parser does, and counts the tokens of its thoughts.

    The end is forced token by token, where the inner constraint allows that, and not within a character.
    """

    def __init__(
        self, limit: ThinkingLimit, inner: TokenMatcher | None, token_bytes: TokenBytes
    ) -> None:
        self._limit = limit
        self._inner = inner
        self._token_bytes = token_bytes
        self._num_kept = max(
            _MAX_MISSING, *map(len, (limit.start, *limit.ends, limit.closings[0][0]))
        )
        self._num_left = limit.num_tokens
        self._forced: tuple[int, ...] = ()
        self._tail = b""
        self._is_thinking = self._is_late = False
        self._read(limit.begun)
        self._force()

    @property
    def is_complete(self) -> bool:
        return self._inner is not None and self._inner.is_complete

    @property
    def error(self) -> str | None:
        return None if self._inner is None else self._inner.error

    @property
    def num_free(self) -> int:
        if self._inner is not None or self._forced:
            return 0
        if self._is_over:
            return UNLIMITED
        num_left = max(0, self._num_left)
        if self._is_thinking:
            return num_left
        # The next token may begin a thought.
        return 1 + (max(num_left, LATE_TOKENS) if self._is_late else num_left)

    def fill_mask(self, row: MaskRow) -> None:
        if self._inner is None:
            row[:] = -1
        else:
            self._inner.fill_mask(row)
        if not self._forced:
            return
        bits = row.view("<u4")
        word, bit = divmod(self._forced[0], 32)
        if bits[word] >> bit & 1:
            bits[:] = 0
            bits[word] = 1 << bit

    def accept(self, token_id: int) -> None:
        if self._inner is not None:
            self._inner.accept(token_id)
        if self._is_over:
            return
        is_forced = self._forced[:1] == (token_id,)
        self._forced = self._forced[1:] if is_forced else ()
        self._num_left -= self._is_thinking
        self._read(self._token_bytes(token_id))
        if is_forced and not self._forced:
            # Also where the bytes of the tokens are not those of the marker.
            self._is_thinking = False
        self._force()

    @property
    def _is_over(self) -> bool:
        """True if no thought can follow any more."""
        return self._is_late and self._limit.is_first_only

    def _read(self, text: bytes) -> None:
        self._tail += text
        while (mark := self._next_mark()) is not None:
            before, _, self._tail = self._tail.partition(mark)
            self._is_thinking = not self._is_thinking
            if self._is_thinking:
                self._begin(before)
        if not self._is_thinking:
            # The beginning of a marker may be one.
            self._is_late |= not self._limit.start.startswith(self._tail.lstrip())
        self._tail = self._tail[-self._num_kept :]

    def _next_mark(self) -> bytes | None:
        marks = self._limit.ends if self._is_thinking else (self._limit.start,)
        found = [mark for mark in marks if mark in self._tail]
        return min(found, key=self._tail.index, default=None)

    def _begin(self, before: bytes) -> None:
        self._is_late |= bool(before.strip())
        if self._is_late:
            self._num_left = max(self._num_left, LATE_TOKENS)

    def _force(self) -> None:
        if not self._is_thinking or self._num_left > 0 or self._forced:
            return
        if self._num_left > -_MAX_MISSING and _ends_within_character(self._tail):
            return
        closings = self._limit.closings
        self._forced = next(tokens for begun, tokens in closings if self._tail.endswith(begun))


def _ends_within_character(text: bytes) -> bool:
    for num_bytes, byte in enumerate(reversed(text[-_MAX_MISSING:]), 1):
        if byte >= 0xC0:
            return num_bytes < 2 + (byte >= 0xE0) + (byte >= 0xF0)
        if byte < 0x80:
            return False
    return False
