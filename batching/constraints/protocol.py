"""Which tokens may follow: a grammar, or a list of tokens."""

from collections.abc import Iterable
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

# One bit for each token id: bit i % 32 of word i // 32, little end first.
MaskRow = npt.NDArray[np.int32]


class TokenConstraint(Protocol):
    """Follows one request's output; only one thread at a time uses it.

    Nothing of it raises: a failure is an `error`, and ends that request only.
    """

    @property
    def is_complete(self) -> bool:
        """True if nothing but the end may follow."""
        ...

    @property
    def error(self) -> str | None:
        """Why the constraint cannot be followed any further, for a person to read."""
        ...

    def fill_mask(self, row: MaskRow) -> None:
        """Set the bits of the tokens that may follow, and clear all others.

        row: `[ceil(vocab_size / 32)]`.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Advance by the token that was sampled."""
        ...

    def fork(self) -> Self:
        """Return an independent copy in the same state."""
        ...


class AllowedTokens:
    """The same tokens at every position."""

    is_complete = False
    error = None

    def __init__(self, token_ids: Iterable[int]) -> None:
        self._token_ids = np.array(sorted(set(token_ids)))

    def fill_mask(self, row: MaskRow) -> None:
        allowed = np.zeros(32 * len(row), np.uint8)
        allowed[self._token_ids] = 1
        row[:] = np.packbits(allowed, bitorder="little").view("<i4")

    def accept(self, token_id: int) -> None:
        """Nothing changes."""

    def fork(self) -> Self:
        return self
