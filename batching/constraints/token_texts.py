"""The bytes of a vocabulary, to find the tokens that contain a text."""

from collections.abc import Sequence

import numpy as np


class TokenTexts:
    """The bytes of all tokens, one behind the other."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self._bytes = np.frombuffer(b"".join(texts), np.uint8)
        # The token of each byte.
        self._tokens = np.repeat(np.arange(len(texts), dtype=np.int32), [*map(len, texts)])

    def containing(self, text: str) -> frozenset[int]:
        """Return the ids of the tokens that contain a text, which takes a millisecond."""
        first, *rest = text.encode()
        starts = np.flatnonzero(self._bytes[: max(0, len(self._bytes) - len(rest))] == first)
        for offset, byte in enumerate(rest, 1):
            starts = starts[self._bytes[starts + offset] == byte]
        tokens = self._tokens[starts]
        is_within = tokens == self._tokens[starts + len(rest)]
        return frozenset(tokens[is_within].tolist())
