"""Images of a prompt, as a model's vision tower reads them."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Final, NamedTuple

# 63 bits of a digest; the sign tells them from token ids.
_KEY_BYTES: Final = 8


class Span(NamedTuple):
    """Positions `[start, stop)` of a prompt whose tokens see each other, those behind themselves too."""

    start: int
    stop: int


class Spans(tuple[Span, ...]):
    """The spans of a prompt, ascending: what a step has of it ends within none of them."""

    def num_inseparable(self, start: int) -> int:
        """Return how many tokens from `start` on one step has to process at least: one, or the rest of a span."""
        return next((span.stop - start for span in self if start in range(*span)), 1)

    def has_ahead(self, start: int) -> bool:
        """Return whether tokens from `start` on must not be cut from others."""
        return any(span.stop > start for span in self)

    def whole_stop(self, start: int, stop: int) -> int:
        """Return the last position up to `stop` that is not within a span, or `start`."""
        cut = next((span for span in self if span.start < stop < span.stop), None)
        return stop if cut is None else max(cut.start, start)

    def between(self, start: int, stop: int) -> tuple[Span, ...]:
        """Return the spans that end in `[start, stop)`, or what is left of them there."""
        if not self:
            return ()
        spans = (Span(max(start, span.start), span.stop) for span in self)
        return tuple(span for span in spans if span.start < span.stop <= stop)


class TowerArray(NamedTuple):
    """An input of a tower, by the name that the family's processor has for it, as `pixel_values`.

    dtype: as numpy writes it, with the order of bytes.
    data: in C order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class ImageInput:
    """An image after the model's own processor: what its tower reads, and the tokens that it takes in a prompt.

    token_ids: the tokens of the image, with those that the family writes around and between its rows.
    rows: which of these get their embeddings from the tower, ascending; the tower makes as many.
    sees_ahead: rows side by side see each other, in the layers that the model has for that.
    before: text that the family writes before these tokens; a tokenizer may join it with that of the prompt.
    after: the same behind them.
    """

    token_ids: tuple[int, ...]
    rows: tuple[int, ...]
    arrays: tuple[TowerArray, ...] = field(repr=False)
    sees_ahead: bool = False
    before: str = ""
    after: str = ""

    def __reduce__(self) -> tuple[type["ImageInput"], tuple[object, ...]]:
        """Leave out of a message what follows from the rest."""
        values = (self.token_ids, self.rows, self.arrays, self.sees_ahead, self.before, self.after)
        return ImageInput, values

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Which of the tokens see each other, from the first one on."""
        if not self.sees_ahead:
            return ()
        rows = frozenset(self.rows)
        firsts = [row for row in self.rows if row - 1 not in rows]
        lasts = [row for row in self.rows if row + 1 not in rows]
        return tuple(Span(first, last + 1) for first, last in zip(firsts, lasts, strict=True))

    @property
    def num_bytes(self) -> int:
        return sum(len(array.data) for array in self.arrays)

    @cached_property
    def digest(self) -> bytes:
        """The SHA-256 of all that the tower's output depends on: names, types, shapes and contents."""
        digest = sha256(repr((self.token_ids, self.rows)).encode())
        for *named, data in sorted(self.arrays):
            digest.update(repr(named).encode())
            digest.update(data)
        return digest.digest()

    @cached_property
    def cache_ids(self) -> "array[int]":
        """What stands for the tokens in the prefix cache: a row is named by the image and by its place in it.

        They are negative, so that they are no tokens, and go nowhere but into hashes of blocks.
        """
        ids = array("q", self.token_ids)
        for index, row in enumerate(self.rows):
            key = sha256(self.digest + index.to_bytes(4)).digest()[:_KEY_BYTES]
            ids[row] = -1 - (int.from_bytes(key) >> 1)
        return ids


class PlacedImage(NamedTuple):
    """An image in a prompt, whose tokens begin at position `start`."""

    start: int
    image: ImageInput

    @property
    def stop(self) -> int:
        return self.start + len(self.image.token_ids)

    @property
    def spans(self) -> list[Span]:
        """Which tokens of the prompt see each other."""
        return [Span(self.start + first, self.start + stop) for first, stop in self.image.spans]


def cache_ids(prompt: Sequence[int], images: Sequence[PlacedImage]) -> list[int]:
    """Return what stands for the tokens of a prompt in the prefix cache."""
    ids = [*prompt]
    for placed in images:
        ids[placed.start : placed.stop] = placed.image.cache_ids
    return ids
