"""The format of gpt-oss, in which each part of a message has a header with its channel and recipient.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

Source: OpenAI's description of the harmony response format.
"""

import json
import re
from collections.abc import Callable
from typing import Final

from app.parsing.events import (
    ContentPiece,
    MessageEvent,
    ReasoningPiece,
    ToolCallArguments,
    ToolCallStart,
    join_pieces,
)
from app.parsing.markers import MarkerSearch
from app.parsing.tools.tool_parser import new_call_id

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
CONSTRAIN: Final = "<|constrain|>"
MESSAGE: Final = "<|message|>"
END: Final = "<|end|>"
CALL: Final = "<|call|>"
RETURN: Final = "<|return|>"
ENDS: Final = (END, CALL, RETURN)
MARKERS: Final = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)

FUNCTIONS: Final = "functions."
_RECIPIENT: Final = re.compile(r"\bto=([^\s<]+)")
_REASONING_CHANNEL: Final = "analysis"
# A header is short; longer text without markers is the content of a model that writes none.
_MAX_HEADER: Final = 256


class HarmonyParser:
    """Splits parts by their headers: analysis is reasoning, a part with a recipient is a call.

    All other parts are content, and so is text without any header.  Without tools a recipient means
    nothing.  Without `is_parallel` one call is read, and the text after it is ignored.
    `begun`: what the prompt has of the first part, after its role; its text is in no event.
    """

    is_plain: Final = False

    def __init__(
        self,
        *,
        has_tools: bool,
        is_parallel: bool = True,
        new_id: Callable[[], str] = new_call_id,
        begun: str = "",
    ) -> None:
        self._has_tools: Final = has_tools
        self._is_parallel: Final = is_parallel
        self._new_id: Final = new_id
        self._search = MarkerSearch(*MARKERS)
        # None within the text of a part.
        self._header: str | None = ""
        self._has_marker = False
        self._piece: Callable[[str], MessageEvent] = ContentPiece
        self._num_calls = 0
        # Of the last call: the end token after them is not part of the text.
        self._arguments: list[str] = []
        self.is_finished = False
        self._begun: list[MessageEvent] = []
        self._begun = [e for e in self.add(begun) if isinstance(e, ToolCallStart)]

    @property
    def has_calls(self) -> bool:
        """True if there are calls, none of them cut short."""
        return self._num_calls > 0 and _is_json("".join(self._arguments))

    def add(self, text: str) -> list[MessageEvent]:
        """Add the next piece; return the events that are now certain."""
        events = self._take_begun()
        for part in [text] if self._search.is_plain_text(text) else text:
            certain, marker = self._search.push(part)
            if self.is_finished:
                break
            events += self._text(certain)
            if marker:
                events += self._mark(marker)
        return join_pieces(events)

    def flush(self) -> list[MessageEvent]:
        """Return the events held back; no more text follows."""
        events = self._take_begun()
        if self.is_finished:
            return events
        events += self._text(self._search.flush())
        if self._header is not None and not self._has_marker:
            events.append(ContentPiece(self._header))
        return join_pieces(events)

    def _take_begun(self) -> list[MessageEvent]:
        events, self._begun = self._begun, []
        return events

    def _text(self, text: str) -> list[MessageEvent]:
        if self._header is None:
            piece = self._piece(text)
            if isinstance(piece, ToolCallArguments):
                self._arguments.append(text)
            return [piece]
        self._header += text
        if self._has_marker or len(self._header) <= _MAX_HEADER:
            return []
        text, self._header = self._header, None
        return [ContentPiece(text)]

    def _mark(self, marker: str) -> list[MessageEvent]:
        self._has_marker = True
        if marker == MESSAGE:
            return self._begin_part(self._header or "")
        if marker == CHANNEL:
            self._header = (self._header or "") + marker
        elif marker == CONSTRAIN:
            # What follows is not part of a name before it.
            self._header = self._header and f"{self._header} "
        else:
            self.is_finished = marker in (CALL, RETURN) or (
                self._num_calls > 0 and not self._is_parallel
            )
            self._header = ""
        return []

    def _begin_part(self, header: str) -> list[MessageEvent]:
        self._header = None
        recipient = _RECIPIENT.search(header)
        if recipient is not None and self._has_tools:
            return self._begin_call(recipient[1].removeprefix(FUNCTIONS))
        channel = header.partition(CHANNEL)[2].split()
        is_reasoning = channel[:1] == [_REASONING_CHANNEL]
        self._piece = ReasoningPiece if is_reasoning else ContentPiece
        return []

    def _begin_call(self, name: str) -> list[MessageEvent]:
        index, self._num_calls = self._num_calls, self._num_calls + 1
        self._piece = lambda text: ToolCallArguments(index, text)
        self._arguments = []
        return [ToolCallStart(index, self._new_id(), name)]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
