"""Finds, among token sequences, one with the longest common beginning with another sequence."""

from array import array
from bisect import bisect_left, insort


class SharedBeginnings:
    """Blocks sorted by their tokens, to find the one with the longest beginning in common with a prompt.

    In lexicographic order that block is next to the position of the prompt, so a lookup takes O(log n)
    comparisons.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[array[int], int]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, tokens: "array[int]", block_id: int) -> None:
        insort(self._entries, (tokens, block_id))

    def remove(self, tokens: "array[int]", block_id: int) -> None:
        entry = self._entries.pop(bisect_left(self._entries, (tokens, block_id)))
        assert entry == (tokens, block_id), "it was added"

    def longest(self, tokens: "array[int]") -> tuple[int, int]:
        """Return the number of common tokens and the block id; there must be at least one block."""
        at = bisect_left(self._entries, (tokens, -1))
        beside = self._entries[max(0, at - 1) : at + 1]
        return max((_num_common(tokens, other), block_id) for other, block_id in beside)


def _num_common(tokens: "array[int]", other: "array[int]") -> int:
    pairs = enumerate(zip(tokens, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(other)))
