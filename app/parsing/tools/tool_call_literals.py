"""Tool calls with arguments as literals: calls of Python, and the objects of the Gemma models."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from app.parsing.grammars.schema_types import ANY_TYPE, type_of
from app.parsing.grammars.tool_grammar import Rules
from app.parsing.grammars.tool_literal_grammar import LiteralRules
from app.parsing.json_text import load_json
from app.parsing.tool_call_reader import (
    BLANKS,
    CallArguments,
    CallEnds,
    CallReader,
    CallText,
    NotCallSyntax,
    Read,
    Steps,
    Write,
)
from app.parsing.tool_spec import ToolSpec
from app.parsing.tools.json_text import escaped, pass_rest
from app.parsing.tools.python_strings import QUOTES, is_string, read_string

_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
# The most values inside each other; more brackets are not read.
_MAX_DEPTH: Final = 64
_CLOSERS: Final = {"{": "}", "[": "]", "(": ")"}
_END_OF_LITERAL: Final = "\0"
_NUMBER: Final = re.compile(r"[+-]?[0-9.][0-9A-Za-z_.+-]*")
_FLOAT: Final = re.compile(r"[+-]?[0-9_]*[.eE]")


class _JsonWriter:
    """Writes arguments as JSON, and knows which brackets are open.

    Whether a round bracket is a tuple's, only a comma or the end shows; what is in it waits for
    that.
    """

    def __init__(self, write: Write) -> None:
        self._write = write
        # One is empty while its bracket may mean nothing; what is in that is in `_held`.
        self.closers: list[str] = []
        self._held: list[list[str]] = []

    def write(self, text: str) -> None:
        if self._held:
            self._held[-1].append(text)
        else:
            self._write(text)

    def open(self, bracket: str) -> None:
        if len(self.closers) >= _MAX_DEPTH:
            raise NotCallSyntax
        if bracket == "(":
            self._held.append([])
            self.closers.append("")
        else:
            self.write(bracket)
            self.closers.append(_CLOSERS[bracket])

    def separate(self, *, is_last: bool) -> None:
        """Write a comma, unless it stands before the end."""
        if not self.closers[-1]:
            self.closers[-1] = "]"
            self.write("[" + self._take_held())
        if not is_last:
            self.write(", ")

    def close(self) -> None:
        self.write(self.closers.pop() or self._take_held() or "[]")

    def release(self) -> None:
        """Write all that waits."""
        while self._held:
            self.write(self._take_held())

    def _take_held(self) -> str:
        return "".join(self._held.pop())


@dataclass(frozen=True, slots=True, kw_only=True)
class LiteralSyntax:
    """`name(key=value, ...)` or `call:name{key:value,...}`.

    head: before the name.
    bracket: opens the parameters; `assign` stands between a key and its value.
    quote: on both sides of a string, whose text is then as it is; "" for strings of Python.
    has_bare_words: keys need no quotes, and a value that is nothing else is a string.
    """

    head: str = ""
    bracket: str = "("
    assign: str = "="
    comma: str = ", "
    quote: str = ""
    opening: str = "["
    closing: str = "]"
    separator: str | None = ", "
    has_bare_words: bool = True

    def rules(self, rules: Rules, name: str, tool: ToolSpec, *, is_bound: bool) -> None:
        parameters = LiteralRules(
            rules, tool, assign=self.assign, comma=self.comma, quote=self.quote
        ).parameters(name)
        begin = rules.spell(self.head + tool.name + self.bracket)
        rules.add(name, f"{begin} {parameters} {rules.spell(_CLOSERS[self.bracket])}")

    def reader(self, tools: Sequence[ToolSpec], start: str, end: str) -> Read:
        return self.read

    def read(self, text: CallText) -> Steps[None]:
        if self.opening:
            yield from text.one_of(self.opening)
        while True:
            if self.head:
                yield from text.one_of(self.head)
            name = yield from text.word()
            yield from text.one_of(self.bracket)
            text.begin(name)
            is_whole = yield from self._read_arguments(text)
            text.finish()
            if not is_whole or (yield from self._ends(text)):
                return

    def _ends(self, text: CallText) -> Steps[bool]:
        """Read what follows a call; return False if that is another one."""
        separator = (self.separator or ",").strip()
        markers = [separator, text.end, *filter(None, [self.closing])]
        marker = yield from text.one_of(*markers)
        # A comma may also stand before the end.
        if marker == separator and (yield from text.after(BLANKS)) == self.closing:
            marker = yield from text.one_of(self.closing)
        if marker == self.closing:
            yield from text.one_of(text.end)
        return marker != separator

    def _read_arguments(self, text: CallText) -> Steps[bool]:
        """Read what is in the brackets; return False if the end marker cuts it short."""
        out = _JsonWriter(text.write)
        try:
            yield from self._read_pairs(text, out, _CLOSERS[self.bracket], self.assign)
        except NotCallSyntax:
            out.release()
            yield from pass_rest(text, text.write, [text.end], out.closers)
            return False
        return True

    def _read_pairs(self, text: CallText, out: _JsonWriter, end: str, assign: str) -> Steps[None]:
        out.open("{")
        character = yield from text.after(BLANKS)
        while character != end:
            if character in QUOTES or self.quote.startswith(character):
                yield from self._read_value(text, out)
            elif not self.has_bare_words:
                raise NotCallSyntax
            else:
                key = yield from text.word()
                out.write(f'"{escaped(key)}"')
            yield from text.one_of(assign)
            out.write(": ")
            yield from self._read_value(text, out)
            character = yield from self._next(text, out, end)
        yield from text.take()
        out.close()

    def _read_items(self, text: CallText, out: _JsonWriter, bracket: str) -> Steps[None]:
        end = _CLOSERS[bracket]
        out.open(bracket)
        character = yield from text.after(BLANKS)
        while character != end:
            yield from self._read_value(text, out)
            character = yield from self._next(text, out, end)
        yield from text.take()
        out.close()

    def _next(self, text: CallText, out: _JsonWriter, end: str) -> Steps[str]:
        """Read a comma, unless the end follows; return the character after it."""
        character = yield from text.after(BLANKS)
        if character == end:
            return end
        yield from text.one_of(",")
        # A comma may also stand before the end.
        character = yield from text.after(BLANKS)
        out.separate(is_last=character == end)
        return character

    def _read_value(self, text: CallText, out: _JsonWriter) -> Steps[None]:
        character = yield from text.after(BLANKS)
        if self.quote.startswith(character):
            yield from text.one_of(self.quote)
            out.write('"')
            yield from text.until(self.quote, write=lambda part: out.write(escaped(part)))
            out.write('"')
        elif (yield from is_string(text)):
            yield from read_string(text, out.write)
        elif character == "{":
            yield from text.take()
            yield from self._read_pairs(text, out, "}", ":")
        elif character in "[(":
            yield from self._read_items(text, out, (yield from text.take()))
        else:
            yield from self._read_scalar(text, out)

    def _read_scalar(self, text: CallText, out: _JsonWriter) -> Steps[None]:
        scalar = ""
        while (character := (yield from text.peek())) not in ",}])" and character != text.end[0]:
            scalar += yield from text.take()
        scalar = scalar.strip()
        # A bare word of other formats may be a telephone number.
        value = _WORDS.get(scalar) or _json(scalar) or (None if self.quote else _number(scalar))
        if value is None and not (scalar and self.has_bare_words):
            raise NotCallSyntax
        out.write(value or f'"{escaped(scalar)}"')

    def read_literal(self, written: str) -> str | None:
        """Return the JSON of one literal; None if it is none."""
        text = CallText("", _END_OF_LITERAL)
        reader = CallReader(text, self._read_whole(text))
        events = [event for character in written + text.end for event in reader.push(character)]
        if not any(isinstance(event, CallEnds) for event in events):
            return None
        return "".join(event.text for event in events if isinstance(event, CallArguments))

    def _read_whole(self, text: CallText) -> Steps[None]:
        yield from self._read_value(text, _JsonWriter(text.write))
        yield from text.one_of(text.end)
        text.finish()


_PYTHON: Final = LiteralSyntax(has_bare_words=False)


def json_of(text: str, types: frozenset[str]) -> str | None:
    """Return the JSON of a value of these types, written as JSON or as Python has it.

    None if it is neither; a text that may be a string is then that string.
    """
    written = text.strip()
    value = _json(written) or _PYTHON.read_literal(written)
    if value is None or types == ANY_TYPE:
        return value
    name = type_of(load_json(value))
    return value if "string" not in types or name in types - {"string"} else None


def _json(text: str) -> str | None:
    try:
        load_json(text)
    except ValueError:
        return None
    return text


def _number(text: str) -> str | None:
    """Return the JSON of a number as Python has it; None if it is none."""
    if not _NUMBER.fullmatch(text):
        return None
    try:
        value = float(text) if _FLOAT.match(text) else int(text, 0)
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return None
