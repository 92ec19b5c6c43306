"""Markers such as `<think>` in streamed text."""

from bisect import bisect_left
from typing import Final


class MarkerSearch:
    """Separates text from markers; holds back text that may be the beginning of a marker.

    It processes one character at a time, so the result does not depend on how the text is split.  The work
    per character is bounded by the length of a marker, and hardly depends on their number; `copy` of one that has
    not begun takes none.
    """

    def __init__(self, *markers: str) -> None:
        assert all(markers), "an empty marker is everywhere"
        self._markers: Final = sorted(markers)
        self._first_characters: Final = frozenset(marker[0] for marker in markers)
        self._held = ""

    def is_plain_text(self, text: str) -> bool:
        """True if no marker begins in the text or before it, so it need not be searched."""
        return not self._held and self._first_characters.isdisjoint(text)

    def push(self, text: str) -> tuple[str, str]:
        """Add a character, or any plain text.

        Return the text that is now certain, and the marker after it or "".
        """
        if self.is_plain_text(text):
            return text, ""
        seen = self._held + text
        certain = 0
        while not self._next_marker(seen[certain:]).startswith(seen[certain:]):
            certain += 1
        self._held = seen[certain:]
        return seen[:certain], self._take_marker()

    def flush(self) -> str:
        """Return the text held back; no more follows.

        A marker of several tags that is cut after a whole one is no text.
        """
        held, self._held = self._held, ""
        return "" if held.startswith("<") and ">" in held else held

    def _next_marker(self, text: str) -> str:
        """Return the first marker that does not sort before a text: if any begins with that, this one does."""
        index = bisect_left(self._markers, text)
        return self._markers[index] if index < len(self._markers) else ""

    def _take_marker(self) -> str:
        if not self._held or self._held != self._next_marker(self._held):
            return ""
        marker, self._held = self._held, ""
        return marker
