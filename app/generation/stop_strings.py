"""Stop strings in streamed text."""

from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """Passes text on until the first stop string.

    The first one is that which is complete first, and of several that end together the longest.  It
    depends on the text only, not on how it is split into pieces.  A tail that might be the beginning of a
    stop string is held back.

    include_stop: whether the text ends with the stop string or before it.
    matched: the stop string that was found; None so far.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._include_stop = include_stop
        self._matchers = [_Matcher(stop) for stop in stops]
        self._held = ""
        self.matched: str | None = None

    @property
    def is_matched(self) -> bool:
        return self.matched is not None

    def add(self, text: str) -> str:
        """Add the next piece; return the text that certainly belongs to the output."""
        if self.is_matched:
            return ""
        if not self._matchers:
            return text
        seen = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            for matcher in self._matchers:
                matcher.advance(character)
            if complete := [m.stop for m in self._matchers if m.is_complete]:
                self.matched, self._held = max(complete, key=len), ""
                return seen[: end if self._include_stop else end - len(self.matched)]
        num_held = max((matcher.num_matched for matcher in self._matchers), default=0)
        certain = len(seen) - num_held
        self._held = seen[certain:]
        return seen[:certain]

    def flush(self) -> str:
        """Return the text held back; no more follows."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """Tracks how much of one stop string the text ends with (Knuth, Morris, Pratt).

    It compares each character once, amortized, however long the stop string is.
    """

    def __init__(self, stop: str) -> None:
        assert stop, "an empty stop string ends every text"
        self.stop = stop
        self._borders = _borders(stop)
        self.num_matched = 0

    @property
    def is_complete(self) -> bool:
        return self.num_matched == len(self.stop)

    def advance(self, character: str) -> None:
        self.num_matched = _extend(self.stop, self._borders, self.num_matched, character)


# All choices of a request have the same stop strings.
@lru_cache(maxsize=64)
def _borders(text: str) -> tuple[int, ...]:
    """Return for each prefix the length of its longest proper prefix that is also its suffix."""
    borders = [0]
    for character in text[1:]:
        borders.append(_extend(text, borders, borders[-1], character))
    return tuple(borders)


def _extend(text: str, borders: Sequence[int], num_matched: int, character: str) -> int:
    while num_matched and text[num_matched] != character:
        num_matched = borders[num_matched - 1]
    return num_matched + (text[num_matched] == character)
