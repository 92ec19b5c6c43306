"""The input of a custom tool's call, out of the JSON object that the model writes."""

import json
import re
from typing import Final

# Characters in which the text begins, else each further piece would be looked at with all before.
_MAX_BEGIN: Final = 256
_BEGIN: Final = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_BEGIN_WITHOUT_BLANKS: Final = '{"input":"'
# The end of a string's text that more text may change: half an escape, or half a surrogate pair.
_UNCERTAIN: Final = re.compile(
    r"(?<!\\)(?:\\\\)*(\\(?:u[0-9a-fA-F]{0,3})?|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?)$"
)
_CLOSING_QUOTE: Final = re.compile(r'(?<!\\)(?:\\\\)*(")')


class CustomInput:
    """Unwraps `{"input": "..."}` as it arrives.

    Other JSON gives the input in the end, and what is no such object is the input itself.  A call
    that is cut before its text begins has none.
    """

    def __init__(self) -> None:
        self._unread = ""
        self._is_in_text = self._has_ended = False

    def push(self, text: str) -> str:
        """Add the next piece of the arguments; return the input that is now certain."""
        if self._has_ended:
            return ""
        may_begin = len(self._unread) <= _MAX_BEGIN
        self._unread += text
        if not self._is_in_text:
            if not may_begin or (begin := _BEGIN.match(self._unread)) is None:
                return ""
            self._is_in_text, self._unread = True, self._unread[begin.end() :]
        return self._read_text()

    def flush(self) -> str:
        """Return the input held back; no more arguments follow."""
        if self._has_ended:
            return ""
        self._has_ended = True
        return _decoded(self._unread) if self._is_in_text else _input_of(self._unread)

    def _read_text(self) -> str:
        if (quote := _CLOSING_QUOTE.search(self._unread)) is not None:
            self._has_ended = True
            return _decoded(self._unread[: quote.start(1)])
        uncertain = _UNCERTAIN.search(self._unread)
        end = len(self._unread) if uncertain is None else uncertain.start(1)
        certain, self._unread = self._unread[:end], self._unread[end:]
        return _decoded(certain)


def _decoded(text: str) -> str:
    """Return the text that stands in a JSON string; without its escapes if it is none."""
    try:
        value: str = json.loads(f'"{text}"', strict=False)
    except ValueError:
        return text
    # Half of a surrogate pair is no text.
    return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _input_of(raw: str) -> str:
    try:
        value = json.loads(raw, strict=False)
    except (ValueError, RecursionError):
        return "" if _BEGIN_WITHOUT_BLANKS.startswith("".join(raw.split())) else raw
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else raw
