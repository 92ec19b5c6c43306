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
_RECIPIENT: Final = re.compile(r"\bto=([^\s<{]+)")
REASONING_CHANNEL: Final = "analysis"
_REASONING: Final = re.compile(rf"{re.escape(CHANNEL)}\s*{REASONING_CHANNEL}")
# The parts of a header, perhaps cut off; all else in it is text whose marker is missing, also right after a name.
_HEADER_PART: Final = re.compile(
    rf"(?:{'|'.join(map(re.escape, (START, CHANNEL, CONSTRAIN)))})\s*"
    r"(?:assistant|analysis|commentary|final|json|code|[\w.]*\Z)?"
    r"(?:\s+to=[^\s<{]*(?:\s+(?:json|code)\b)?|\s+json\b|\s+(?:to?|js?o?)\Z)?\s*"
    r"|^\s*to=[^\s<{]*\s*(?=<\|)"
)
# In characters; what is longer is no header.
_MAX_HEADER: Final = 256


class HarmonyParser:
    """Splits parts by their headers: analysis is reasoning, a part with a recipient is a call.

    All other parts are content, and so is text without any header.  Text in a header, which lacks
    the marker before it, belongs to that part.  Without tools a recipient means nothing.  Without
    `is_parallel` one call is read, and the text after it is ignored.
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
        self._piece: Callable[[str], MessageEvent] = ContentPiece
        self._num_calls = 0
        self._is_call = False
        # The arguments of the last call: the end token after them is not part of the text.
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
        rest = self._search.flush()
        # After the markers of a header it is the beginning of another one.
        if not self._header or _split(self._header)[1].strip():
            events += self._text(rest)
        return join_pieces([*events, *self._end_header()])

    def _take_begun(self) -> list[MessageEvent]:
        events, self._begun = self._begun, []
        return events

    def _text(self, text: str) -> list[MessageEvent]:
        if self._header is None:
            if self._is_call:
                self._arguments.append(text)
            return [self._piece(text)]
        self._header += text
        if len(self._header) <= _MAX_HEADER:
            return []
        header, rest = self._header[:_MAX_HEADER], self._header[_MAX_HEADER:]
        return [*self._begin_unmarked(header), *self._text(rest)]

    def _mark(self, marker: str) -> list[MessageEvent]:
        if marker == MESSAGE:
            return self._begin_part(self._header or "")
        if marker == CONSTRAIN:
            # The text that follows is not part of a name before it.
            if self._header and marker not in self._header:
                self._header += f" {marker}"
            return []
        if marker == CHANNEL and self._header is not None and marker not in self._header:
            self._header += marker
            return []
        events = self._end_part()
        self.is_finished = marker in (CALL, RETURN) or (
            self._num_calls > 0 and not self._is_parallel
        )
        self._header = "" if marker in ENDS else marker
        return events

    def _begin_part(self, header: str) -> list[MessageEvent]:
        self._header = None
        recipient = _RECIPIENT.search(header)
        if recipient is not None and self._has_tools:
            return self._begin_call(recipient[1].removeprefix(FUNCTIONS))
        self._piece = ReasoningPiece if _REASONING.search(header) else ContentPiece
        self._is_call = False
        return []

    def _begin_unmarked(self, header: str) -> list[MessageEvent]:
        """Begin a part without the marker between its header and its text."""
        header, text = _split(header)
        return [*self._begin_part(header), *self._text(text)]

    def _end_header(self) -> list[MessageEvent]:
        """Begin the part of a header that has text in it."""
        if self._header is not None and _split(self._header)[1].strip():
            return self._begin_unmarked(self._header)
        return []

    def _end_part(self) -> list[MessageEvent]:
        """Return what is missing: the text that is in the header, or the arguments of a call."""
        events = self._end_header()
        if self._header is None and self._is_call and not "".join(self._arguments).strip():
            events += self._text("{}")
        return events

    def _begin_call(self, name: str) -> list[MessageEvent]:
        index, self._num_calls = self._num_calls, self._num_calls + 1
        self._piece = lambda text: ToolCallArguments(index, text)
        self._is_call = True
        self._arguments = []
        return [ToolCallStart(index, self._new_id(), name)]


def _split(header: str) -> tuple[str, str]:
    """Return a header without the text in it, and that text."""
    return "".join(_HEADER_PART.findall(header)), _HEADER_PART.sub("", header)


def _is_json(text: str) -> bool:
    try:
        # Python limits the digits of an integer, JSON does not.
        json.loads(text, parse_int=str)
    except (ValueError, RecursionError):
        return False
    return True
