"""Ends a text of code at a line, as llama.cpp: after a time, or where the indentation ends."""

import time
from collections.abc import Callable, Sequence

from app.parsing.events import ContentPiece, MessageEvent


class LineLimits:
    """The parser of one completion.

    Behind its first line, it ends at a line that begins with fewer than `min_indent` spaces and tabs, before its text
    or, if it is blank, before its "\\n" or "\\r\\n"; and at the end of any line, once `max_seconds` have passed since
    the first token.  0 is no limit.
    """

    has_calls = False

    def __init__(
        self, min_indent: int, max_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._min_indent = min_indent
        self._max_seconds = max_seconds
        self._clock = clock
        self._started: float | None = None
        # Of a further line that has no text yet.
        self._indent: int | None = None
        self.is_plain = not (min_indent or max_seconds)
        self.is_finished = False

    def add(self, text: str) -> Sequence[MessageEvent]:
        if self.is_finished:
            return []
        if self._started is None:
            self._started = self._clock()
        text = self._indented(text)
        if self._max_seconds and "\n" in text:
            self.is_finished |= self._clock() - self._started > self._max_seconds
        return [ContentPiece(text)] if text else []

    def flush(self) -> Sequence[MessageEvent]:
        return []

    def _indented(self, text: str) -> str:
        """Return the text up to that of a line which is indented too little."""
        for position, character in enumerate(text if self._min_indent else ""):
            if self._indent is not None and character in " \t":
                self._indent += 1
                continue
            if self._indent is not None and self._indent < self._min_indent:
                self.is_finished = True
                return text[:position]
            self._indent = 0 if character == "\n" else None
        return text
