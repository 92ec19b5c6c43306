"""Splits the text of a model into reasoning, content and tool calls."""

from collections.abc import Iterable

from app.parsing.events import ContentPiece, MessageEvent, join_pieces
from app.parsing.reasoning.reasoning_parser import ReasoningParser
from app.parsing.tools.tool_parser import ToolCallParser


class MessageParser:
    """Splits text into reasoning, content and tool calls.

    A call cannot begin within reasoning, nor reasoning within a call, since either may contain the markers
    of the other as text.
    """

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolCallParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def is_plain(self) -> bool:
        return self._reasoning is None and self._tools is None

    @property
    def has_calls(self) -> bool:
        return self._tools is not None and self._tools.has_calls

    @property
    def is_finished(self) -> bool:
        """True once all further text is ignored, so the generation can end."""
        return self._tools is not None and self._tools.is_finished

    def add(self, text: str) -> list[MessageEvent]:
        """Add the next piece; return the events that are now certain."""
        pieces = text if self._may_change_reader(text) else [text]
        return join_pieces(event for piece in pieces for event in self._push(piece))

    def flush(self) -> list[MessageEvent]:
        """Return the events held back; no more text follows."""
        events: list[MessageEvent] = []
        if self._reasoning is not None:
            events += self._with_calls(self._reasoning.flush())
        if self._tools is not None:
            events += self._tools.flush()
        return join_pieces(events)

    def _may_change_reader(self, text: str) -> bool:
        """True if each character may determine which parser gets the next one."""
        if self._reasoning is None or self._tools is None:
            return False
        return not (self._reasoning.is_plain_text(text) or self._tools.is_plain_text(text))

    def _push(self, text: str) -> list[MessageEvent]:
        if self._reasoning is None or (self._tools is not None and self._tools.is_in_call):
            return self._with_calls([ContentPiece(text)])
        events = self._with_calls(self._reasoning.add(text))
        if self._tools is not None and self._tools.is_in_call:
            # Text that may begin a marker outside a call does not inside.
            events += self._with_calls(self._reasoning.flush())
        return events

    def _with_calls(self, pieces: Iterable[MessageEvent]) -> list[MessageEvent]:
        events: list[MessageEvent] = []
        for piece in pieces:
            if self._tools is not None and isinstance(piece, ContentPiece):
                events += self._tools.add(piece.text)
            else:
                events.append(piece)
        return events
