"""Which tokens may follow: a grammar, or a list of tokens."""

from collections.abc import Iterable
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

# More tokens than any output has.
UNLIMITED: Final = 1 << 40

# One bit for each token id: bit i % 32 of word i // 32, little end first.
MaskRow = npt.NDArray[np.int32]


class TokenMatcher(Protocol):
    """Follows one output; only one thread at a time uses it.

    No method raises: a failure is an `error`, and ends that sequence only.
    """

    @property
    def is_complete(self) -> bool:
        """True if nothing but the end may follow."""
        ...

    @property
    def error(self) -> str | None:
        """Why the constraint cannot be followed any further, for a person to read."""
        ...

    @property
    def num_free(self) -> int:
        """How many of the next tokens need no mask, whatever the ones before them are."""
        ...

    def fill_mask(self, row: MaskRow) -> None:
        """Set the bits of the tokens that may follow, and clear all others.

        row: `[ceil(vocab_size / 32)]`.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Advance by the token that was sampled."""
        ...


class Constraint(Protocol):
    """The rules for an output, as a value: two are equal if they allow the same outputs.

    A plan carries it to the executor, which makes a matcher of it for each sequence.
    """

    def matcher(self) -> TokenMatcher:
        """Return a matcher at the beginning of an output; this costs microseconds."""
        ...


class AllowedTokens:
    """The same tokens at every position; it is its own matcher, since it has no state."""

    is_complete = False
    error = None
    num_free = 0

    def __init__(self, token_ids: Iterable[int]) -> None:
        self.token_ids = tuple(sorted(set(token_ids)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AllowedTokens) and other.token_ids == self.token_ids

    def __hash__(self) -> int:
        return hash(self.token_ids)

    def __repr__(self) -> str:
        return f"AllowedTokens({self.token_ids})"

    def matcher(self) -> "AllowedTokens":
        return self

    def fill_mask(self, row: MaskRow) -> None:
        allowed = np.zeros(32 * len(row), np.uint8)
        allowed[list(self.token_ids)] = 1
        row[:] = np.packbits(allowed, bitorder="little").view("<i4")

    def accept(self, token_id: int) -> None:
        """Nothing changes."""
