"""Markers, such as `<think>`, found while the text is still coming."""

from typing import Final


class MarkerSearch:
    """Lets text through, except the markers; holds back what may be the beginning of one.

    It looks at a character at a time, so what it finds does not depend on the pieces that the
    text comes in.  The work for a character is bounded by the length of a marker.
    """

    def __init__(self, *markers: str) -> None:
        assert all(markers), "an empty marker is everywhere"
        self._markers: Final = frozenset(markers)
        self._beginnings: Final = frozenset(m[:end] for m in markers for end in range(len(m) + 1))
        self._first_characters: Final = frozenset(marker[0] for marker in markers)
        self._held = ""

    def lets_through(self, text: str) -> bool:
        """True if the whole text is certain, so that nobody has to look at each character."""
        return not self._held and self._first_characters.isdisjoint(text)

    def push(self, text: str) -> tuple[str, str]:
        """Take a character, or any text that is let through.

        Return the text that is certain now, and the marker behind it or "".
        """
        if self.lets_through(text):
            return text, ""
        seen = self._held + text
        certain = 0
        while seen[certain:] not in self._beginnings:
            certain += 1
        self._held = seen[certain:]
        return seen[:certain], self._take_marker()

    def flush(self) -> str:
        """Return what was held back; no more text will come."""
        held, self._held = self._held, ""
        return held

    def _take_marker(self) -> str:
        return self.flush() if self._held in self._markers else ""
