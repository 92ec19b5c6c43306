"""A budget of thinking over bytes, and what it makes of a model's output."""

from collections.abc import Callable, Sequence

import numpy as np

from batching.constraints.protocol import Constraint, TokenMatcher
from batching.constraints.thinking import ThinkingBudget, ThinkingLimit
from batching.steps.sequences import SequenceState
from tests.support.speaker import END, Speaker

VOCAB_SIZE = 256


def byte_of(token_id: int) -> bytes:
    return bytes([token_id % 256])


def byte_limit(
    num_tokens: int,
    *,
    start: bytes = b"<t>",
    end: bytes = b"</t>",
    before: bytes = b"",
    after: bytes = b"",
    begun: bytes = b"",
    is_first_only: bool = False,
) -> ThinkingLimit:
    """Return a limit for a vocabulary of bytes."""
    closing = before + end + after
    return ThinkingLimit(
        num_tokens=num_tokens,
        start=start,
        ends=(end,),
        closings=tuple(
            (closing[:n], tuple(closing[n:])) for n in reversed(range(len(before + end)))
        ),
        begun=begun,
        is_first_only=is_first_only,
    )


def byte_budget(
    num_tokens: int, *, inner: Constraint | None = None, **limit: bytes | bool
) -> ThinkingBudget:
    return ThinkingBudget(byte_limit(num_tokens, **limit), inner, byte_of)  # type: ignore[arg-type]


def allowed(matcher: TokenMatcher, vocab_size: int = VOCAB_SIZE) -> list[int]:
    row = np.zeros(-(-vocab_size // 32), np.int32)
    matcher.fill_mask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")[:vocab_size]
    return [int(token_id) for token_id in np.flatnonzero(bits)]


def output_of(
    matcher: TokenMatcher, next_token: Callable[[Sequence[int]], int], num_tokens: int
) -> list[int]:
    """Return what a model says token by token, each under its mask."""
    output: list[int] = []
    for _ in range(num_tokens):
        token_id, may_follow = next_token(output), allowed(matcher)
        output.append(token_id if token_id in may_follow else may_follow[0])
        matcher.accept(output[-1])
    return output


def say(matcher: TokenMatcher, text: bytes, num_tokens: int | None = None) -> bytes:
    """Return what a model says that wants to say these bytes; forced ones take no place of its own."""
    rest = list(text)
    output = bytearray()
    while rest and (num_tokens is None or len(output) < num_tokens):
        may_follow = allowed(matcher)
        output.append(rest.pop(0) if len(may_follow) > 1 else may_follow[0])
        matcher.accept(output[-1])
    return bytes(output)


class Undaunted(Speaker):
    """Says its answer to the end, whatever is forced between; that has other tokens than the answer."""

    def _choose(self, sequence: SequenceState, prefix: list[int]) -> int:
        assert self._answer is not None
        position = 0
        for token_id in prefix[sequence.num_prompt_tokens :]:
            position += self._answer[position : position + 1] == [token_id]
        return self._answer[position] if position < len(self._answer) else END
