"""Tool calls in streamed text."""

import secrets
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from app.parsing.events import (
    ContentPiece,
    MessageEvent,
    ToolCallArguments,
    ToolCallStart,
    join_pieces,
)
from app.parsing.markers import MarkerSearch
from app.parsing.tool_call_reader import CallArguments, CallBegins, CallEvent, CallReader, NotACall

# As in OpenAI's ids.
_NUM_ID_BYTES: Final = 12


def new_call_id() -> str:
    return f"call_{secrets.token_hex(_NUM_ID_BYTES)}"


class ToolCallParser:
    """Splits the text of a model into content and tool calls.

    No text is lost: text outside calls, and a start marker that begins none, is content.  The text
    after such a marker is searched again, so a call there is found.  Only whitespace between calls
    and content is dropped.

    Without `is_parallel` one call is read and the text after it is ignored: once `is_finished`, the
    generation can end.
    """

    def __init__(
        self,
        start: str,
        new_reader: Callable[[], CallReader],
        *,
        is_parallel: bool = True,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._search = MarkerSearch(start)
        self._new_reader = new_reader
        self._is_parallel = is_parallel
        self._new_id = new_id
        self._reader: CallReader | None = None
        self._whitespace: list[str] = []
        self._num_calls = 0
        self._call_ids: set[str] = set()
        self._is_open = False
        self.is_finished = False

    @property
    def has_calls(self) -> bool:
        """True if there are calls, none of them cut short."""
        return self._num_calls > 0 and not self._is_open

    @property
    def is_in_call(self) -> bool:
        """True between a start marker and the end of what it begins."""
        return self._reader is not None

    def is_plain_text(self, text: str) -> bool:
        """True if the text is content and no marker begins in it."""
        return self._reader is None and self._search.is_plain_text(text)

    def add(self, text: str) -> list[MessageEvent]:
        """Add the next piece; return the events that are now certain."""
        pieces = deque([text] if self.is_plain_text(text) else text)
        events: list[MessageEvent] = []
        while pieces and not self.is_finished:
            events += self._push_next(pieces)
        return join_pieces(events)

    def flush(self) -> list[MessageEvent]:
        """Return the events held back; no more text follows."""
        events = self._content(self._search.flush())
        if self._reader is not None:
            events += self._numbered(self._reader.flush())
            self._reader = None
        if not self._num_calls:
            events.append(ContentPiece("".join(self._whitespace)))
        self._whitespace.clear()
        return join_pieces(events)

    def _push_next(self, pieces: deque[str]) -> list[MessageEvent]:
        """Read the first piece: a character, or any plain text."""
        text = pieces.popleft()
        if self._reader is None:
            certain, marker = self._search.push(text)
            self._reader = self._new_reader() if marker else None
            return self._content(certain)
        found = self._reader.push(text)
        if self._reader.is_done:
            self._reader = None
        for event in found:
            if isinstance(event, NotACall):
                pieces.extendleft(reversed(event.text))
        return self._numbered(found)

    def _content(self, text: str) -> list[MessageEvent]:
        """Return text outside calls; trailing whitespace waits for what follows it."""
        body = text.rstrip()
        if not body:
            self._whitespace.append(text)
            return []
        before = "".join(self._whitespace)
        self._whitespace = [text[len(body) :]]
        return [ContentPiece(before + body)]

    def _numbered(self, events: Iterable[CallEvent]) -> list[MessageEvent]:
        return [numbered for event in events for numbered in self._number(event)]

    def _number(self, event: CallEvent) -> list[MessageEvent]:
        match event:
            case CallBegins(name, call_id):
                self._whitespace.clear()
                self._num_calls += 1
                self._is_open = True
                return [ToolCallStart(self._num_calls - 1, self._unique_id(call_id), name)]
            case CallArguments(text):
                return [ToolCallArguments(self._num_calls - 1, text)]
            case NotACall(marker):
                return self._content(marker)
            case _:
                self._is_open = False
                self.is_finished = not self._is_parallel
                return []

    def _unique_id(self, call_id: str | None) -> str:
        """Return the model's id of a call, or a new one if it has none or repeats one."""
        if call_id is None or call_id in self._call_ids:
            return self._new_id()
        self._call_ids.add(call_id)
        return call_id
