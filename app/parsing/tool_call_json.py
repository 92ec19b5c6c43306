"""Tool calls in JSON: `{"name": ..., "arguments": {...}}` between markers."""

import json
from collections.abc import Callable
from typing import Final

from app.parsing.markers import MarkerSearch
from app.parsing.tool_call_reader import CallArguments, CallBegins, CallEnds, CallEvent, NotACall

_WHITESPACE: Final = " \t\r\n"
_CLOSERS: Final = {"{": "}", "[": "]"}
_ARGUMENT_KEYS: Final = frozenset({"arguments", "parameters"})


class JsonCallReader:
    """Reads one or more calls up to the end marker, and streams their arguments.

    It follows the JSON, so an end marker inside a string is part of the string.  Frequent errors
    of models are corrected where the intention is clear: line breaks inside strings, a brace too
    many or too few at the end, arguments that are null, missing or the text of an object.
    Arguments that have been returned cannot be revoked: if their brackets do not match, the rest
    up to the end marker is returned unchanged.
    """

    def __init__(self, start: str, end: str) -> None:
        self._end: Final = end
        self._num_matched = 0
        # This becomes content if it is not a call.
        self._unread = [start]
        self._step: Callable[[str], list[CallEvent]] = self._between_calls
        self._has_call = False
        self._name: str | None = None
        self._arguments: str | None = None
        self._key = ""
        self._value: list[str] = []
        self._scanner = _Scanner()
        self._search = MarkerSearch(end)
        self.is_done = False

    def push(self, character: str) -> list[CallEvent]:
        self._unread.append(character)
        return self._step(character)

    def flush(self) -> list[CallEvent]:
        """End a call whose arguments have begun as it is; anything less is not a call."""
        return [CallArguments(self._search.flush())] if self._has_call else self._give_up()

    def _between_calls(self, character: str) -> list[CallEvent]:
        if self._end.startswith(character, self._num_matched):
            self._num_matched += 1
            self.is_done = self._num_matched == len(self._end)
            return self._give_up() if self.is_done and not self._has_call else []
        if self._num_matched == 0:
            if character == "{":
                self._begin_object()
                return []
            # Calls may be in a list, and a model may close more than it opened.
            if character in _WHITESPACE or character in (",]}" if self._has_call else "["):
                return []
        return self._give_up()

    def _begin_object(self) -> None:
        self._has_call, self._name, self._arguments = False, None, None
        self._step = self._before_key

    def _before_key(self, character: str) -> list[CallEvent]:
        if character == '"':
            self._begin_value(character, self._in_key)
        elif character == "}":
            return self._end_object()
        elif character != "," and character not in _WHITESPACE:
            return self._leave_object(character)
        return []

    def _in_key(self, character: str) -> list[CallEvent]:
        self._value.append(self._scanner.push(character))
        if self._scanner.is_complete:
            self._key = "".join(self._value)[1:-1]
            self._step = self._before_value
        return []

    def _before_value(self, character: str) -> list[CallEvent]:
        if character == ":" or character in _WHITESPACE:
            return []
        if character in ",}]":
            return self._leave_object(character)
        if character not in '"{[':
            self._value, self._step = [character], self._in_scalar
        elif character == "{" and self._name and not self._has_call and self._is_argument_key():
            self._begin_value(character, self._in_arguments)
            return self._begin_call(self._name, character)
        else:
            self._begin_value(character, self._in_value)
        return []

    def _begin_value(self, character: str, step: Callable[[str], list[CallEvent]]) -> None:
        self._scanner = _Scanner()
        self._value, self._step = [self._scanner.push(character)], step

    def _in_value(self, character: str) -> list[CallEvent]:
        self._value.append(self._scanner.push(character))
        if self._scanner.is_mismatched:
            return self._leave_object(character)
        return self._end_value() if self._scanner.is_complete else []

    def _in_scalar(self, character: str) -> list[CallEvent]:
        if character not in ",}]" and character not in _WHITESPACE:
            self._value.append(character)
            return []
        return [*self._end_value(), *self._step(character)]

    def _in_arguments(self, character: str) -> list[CallEvent]:
        text = self._scanner.push(character)
        if self._scanner.is_mismatched:
            self._step = self._in_broken_arguments
            return self._step(character)
        if not self._scanner.is_complete:
            return [CallArguments(text)]
        self._unread.clear()
        self._step = self._before_key
        return [CallArguments(text), CallEnds()]

    def _in_broken_arguments(self, character: str) -> list[CallEvent]:
        text, marker = self._search.push(character)
        self.is_done = bool(marker)
        return [CallArguments(text), *([CallEnds()] if marker else [])]

    def _end_value(self) -> list[CallEvent]:
        text = "".join(self._value)
        self._step = self._before_key
        if self._has_call:
            return []
        if self._key == "name":
            self._name = _string(text)
        elif self._is_argument_key():
            self._arguments = _object_text(text)
        if self._name is None or self._arguments is None:
            return []
        return self._whole_call(self._name, self._arguments)

    def _end_object(self) -> list[CallEvent]:
        self._step = self._between_calls
        if self._has_call:
            self._unread.clear()
            return []
        return self._give_up() if self._name is None else self._whole_call(self._name, "{}")

    def _leave_object(self, character: str) -> list[CallEvent]:
        """Continue after the object, or where it ceases to be JSON."""
        if not self._has_call:
            return self._give_up()
        self._step = self._between_calls
        return self._step(character)

    def _begin_call(self, name: str, arguments: str) -> list[CallEvent]:
        self._has_call = True
        return [CallBegins(name), CallArguments(arguments)]

    def _whole_call(self, name: str, arguments: str) -> list[CallEvent]:
        self._unread.clear()
        return [*self._begin_call(name, arguments), CallEnds()]

    def _give_up(self) -> list[CallEvent]:
        self.is_done = True
        return [NotACall("".join(self._unread))]

    def _is_argument_key(self) -> bool:
        return self._key in _ARGUMENT_KEYS


class _Scanner:
    """Follows one string, object or array to its end, by its quotes and brackets."""

    def __init__(self) -> None:
        self._closers: list[str] = []
        self._is_in_string = False
        self._is_escaped = False
        self.is_mismatched = False

    @property
    def is_complete(self) -> bool:
        return not self._closers and not self._is_in_string

    def push(self, character: str) -> str:
        """Add a character; return its JSON form."""
        if self._is_in_string:
            return self._push_in_string(character)
        if character == '"':
            self._is_in_string = True
        elif character in _CLOSERS:
            self._closers.append(_CLOSERS[character])
        elif character in "]}":
            self.is_mismatched = self._closers.pop() != character
        return character

    def _push_in_string(self, character: str) -> str:
        self._is_in_string = character != '"' or self._is_escaped
        self._is_escaped = character == "\\" and not self._is_escaped
        # In JSON, control characters inside strings must be escaped.
        return character if character >= " " else json.dumps(character)[1:-1]


def _string(text: str) -> str | None:
    """Return the value of a JSON string; None if it is not one or is empty."""
    try:
        value = json.loads(text) if text.startswith('"') else None
    except ValueError:
        return None
    return value or None


def _object_text(text: str) -> str:
    """Return arguments as the text of an object if they are null or a string with that text."""
    return "{}" if text == "null" else _string(text) or text
