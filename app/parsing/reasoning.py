"""Reasoning, told from the answer by the markers around it."""

from typing import Final

from app.parsing.events import ContentPiece, MessageEvent, ReasoningPiece, join_pieces
from app.parsing.markers import MarkerSearch


def ends_in_thinking(prompt: str, start: str) -> bool:
    """True if a rendered prompt leaves the model inside its reasoning, as some templates do.

    `prompt` may be the end of the prompt only.
    """
    return prompt.rstrip().endswith(start)


class ReasoningParser:
    """Cuts a model's text into reasoning and content.

    The start marker begins reasoning and the end marker begins content, wherever they stand,
    so neither is ever part of a text.  `is_open`: the prompt ended inside the reasoning.

    Line breaks at the beginning of the reasoning or of the content and at the end of the
    reasoning set off the markers, and are dropped; other space is kept.
    """

    def __init__(self, start: str, end: str, *, is_open: bool) -> None:
        self._start: Final = start
        self._search = MarkerSearch(start, end)
        self._is_reasoning = is_open
        self._is_at_beginning = True
        self._num_held_newlines = 0

    def lets_through(self, text: str) -> bool:
        """True if no marker begins in the text, or before it."""
        return self._search.lets_through(text)

    def add(self, text: str) -> list[MessageEvent]:
        """Take the next piece; return what is certain now."""
        pieces: list[MessageEvent] = []
        for part in [text] if self.lets_through(text) else text:
            certain, marker = self._search.push(part)
            pieces.append(self._piece(certain))
            if marker:
                self._is_reasoning = marker == self._start
                self._is_at_beginning, self._num_held_newlines = True, 0
        return join_pieces(pieces)

    def flush(self) -> list[MessageEvent]:
        """Return what was held back; no more text will come."""
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
