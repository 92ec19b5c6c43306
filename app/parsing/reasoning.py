"""Separates reasoning from content by its markers."""

from typing import Final

from app.parsing.events import ContentPiece, MessageEvent, ReasoningPiece, join_pieces
from app.parsing.markers import MarkerSearch


def ends_in_thinking(prompt: str, start: str) -> bool:
    """True if a rendered prompt ends inside the reasoning, as some templates do.

    The end of the prompt is enough.
    """
    return prompt.rstrip().endswith(start)


class ReasoningParser:
    """Splits the text of a model into reasoning and content.

    The start marker begins reasoning and the end marker begins content wherever they occur, so
    neither is part of a text.  `is_open`: the prompt ended inside the reasoning.

    Line breaks at the beginning of the reasoning or of the content and at the end of the
    reasoning belong to the markers and are dropped; other whitespace is kept.
    """

    def __init__(self, start: str, end: str, *, is_open: bool) -> None:
        self._start: Final = start
        self._search = MarkerSearch(start, end)
        self._is_reasoning = is_open
        self._is_at_beginning = True
        self._num_held_newlines = 0

    def is_plain_text(self, text: str) -> bool:
        """True if no marker begins in the text or before it."""
        return self._search.is_plain_text(text)

    def add(self, text: str) -> list[MessageEvent]:
        """Add the next piece; return the events that are now certain."""
        pieces: list[MessageEvent] = []
        for part in [text] if self.is_plain_text(text) else text:
            certain, marker = self._search.push(part)
            pieces.append(self._piece(certain))
            if marker:
                self._is_reasoning = marker == self._start
                self._is_at_beginning, self._num_held_newlines = True, 0
        return join_pieces(pieces)

    def flush(self) -> list[MessageEvent]:
        """Return the events held back; no more text follows."""
        pieces: list[MessageEvent] = [self._piece(self._search.flush())]
        if self._num_held_newlines:
            pieces.append(ReasoningPiece("\n" * self._num_held_newlines))
            self._num_held_newlines = 0
        return join_pieces(pieces)

    def _piece(self, text: str) -> ContentPiece | ReasoningPiece:
        if self._is_at_beginning:
            text = text.lstrip("\n")
            self._is_at_beginning = not text
        return (
            ReasoningPiece(self._hold_newlines(text)) if self._is_reasoning else ContentPiece(text)
        )

    def _hold_newlines(self, text: str) -> str:
        body = text.rstrip("\n")
        num_newlines = len(text) - len(body)
        if not body:
            self._num_held_newlines += num_newlines
            return ""
        held, self._num_held_newlines = self._num_held_newlines, num_newlines
        return "\n" * held + body
