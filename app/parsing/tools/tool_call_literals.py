"""Tool calls with arguments as literals: calls of Python, and the objects of the Gemma models."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from app.parsing.grammars.schema_types import TYPES, type_of
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
    Steps,
)
from app.parsing.tool_spec import ToolSpec
from app.parsing.tools.json_text import escaped, pass_rest

_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
# Of values inside each other; more brackets than that are not read.
_MAX_DEPTH: Final = 64
_CLOSERS: Final = {"{": "}", "[": "]", "(": ")"}
_END_OF_LITERAL: Final = "\0"
_QUOTES: Final = "\"'"
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a"}
_NUM_HEX_DIGITS: Final = {"x": 2, "u": 4, "U": 8}


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

    def read(self, text: CallText, tools: Mapping[str, ToolSpec]) -> Steps[None]:
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
        if marker == self.closing:
            yield from text.one_of(text.end)
        return marker != separator

    def _read_arguments(self, text: CallText) -> Steps[bool]:
        """Read what is in the brackets; return False if the end marker cuts it short."""
        closers: list[str] = []
        try:
            yield from self._read_pairs(text, _CLOSERS[self.bracket], self.assign, closers)
        except NotCallSyntax:
            yield from pass_rest(text, text.write, [text.end], closers)
            return False
        return True

    def _read_pairs(self, text: CallText, end: str, assign: str, closers: list[str]) -> Steps[None]:
        self._open(text, "{", closers)
        character = yield from text.after(BLANKS)
        while character != end:
            if character in _QUOTES or self.quote.startswith(character):
                yield from self._read_value(text, closers)
            elif not self.has_bare_words:
                raise NotCallSyntax
            else:
                key = yield from text.word()
                text.write(f'"{escaped(key)}"')
            yield from text.one_of(assign)
            text.write(": ")
            yield from self._read_value(text, closers)
            character = yield from self._next(text, end)
        yield from text.take()
        text.write(closers.pop())

    def _read_items(self, text: CallText, end: str, closers: list[str]) -> Steps[None]:
        self._open(text, "[", closers)
        character = yield from text.after(BLANKS)
        while character != end:
            yield from self._read_value(text, closers)
            character = yield from self._next(text, end)
        yield from text.take()
        text.write(closers.pop())

    def _open(self, text: CallText, bracket: str, closers: list[str]) -> None:
        if len(closers) >= _MAX_DEPTH:
            raise NotCallSyntax
        text.write(bracket)
        closers.append(_CLOSERS[bracket])

    def _next(self, text: CallText, end: str) -> Steps[str]:
        """Read a comma, unless the end follows; return the character after it."""
        character = yield from text.after(BLANKS)
        if character == end:
            return end
        yield from text.one_of(",")
        # A comma may also stand before the end.
        if (character := (yield from text.after(BLANKS))) != end:
            text.write(", ")
        return character

    def _read_value(self, text: CallText, closers: list[str]) -> Steps[None]:
        character = yield from text.after(BLANKS)
        if self.quote.startswith(character):
            yield from text.one_of(self.quote)
            text.write('"')
            yield from text.until(self.quote, write=lambda part: text.write(escaped(part)))
            text.write('"')
        elif character in _QUOTES:
            yield from _read_string(text)
        elif character == "{":
            yield from text.take()
            yield from self._read_pairs(text, "}", ":", closers)
        elif character in "[(":
            yield from text.take()
            yield from self._read_items(text, _CLOSERS[character], closers)
        else:
            yield from self._read_scalar(text)

    def _read_scalar(self, text: CallText) -> Steps[None]:
        scalar = ""
        while (character := (yield from text.peek())) not in ",}])" and character != text.end[0]:
            scalar += yield from text.take()
        scalar = scalar.strip()
        value = _WORDS.get(scalar) or _json(scalar)
        if value is None and not (scalar and self.has_bare_words):
            raise NotCallSyntax
        text.write(value or f'"{escaped(scalar)}"')

    def read_literal(self, written: str) -> str | None:
        """Return the JSON of one literal; None if it is none."""
        text = CallText("", _END_OF_LITERAL)
        reader = CallReader(text, self._read_whole(text))
        events = [event for character in written + text.end for event in reader.push(character)]
        if not isinstance(events[-1], CallEnds):
            return None
        return "".join(event.text for event in events if isinstance(event, CallArguments))

    def _read_whole(self, text: CallText) -> Steps[None]:
        yield from self._read_value(text, [])
        yield from text.one_of(text.end)
        text.finish()


def _read_string(text: CallText) -> Steps[None]:
    """Read a string of Python; a quote in it that nothing can follow is part of it."""
    quote = yield from text.take()
    text.write('"')
    while True:
        character = yield from text.take()
        if character == "\\":
            text.write((yield from _escape(text)))
        elif character != quote:
            text.write(escaped(character))
        else:
            blanks = ""
            while (following := (yield from text.peek())) in BLANKS:
                blanks += yield from text.take()
            if following in ",:)]}" or following == text.end[0]:
                break
            text.write(escaped(quote + blanks))
    text.write('"')


def _escape(text: CallText) -> Steps[str]:
    """Return an escape sequence of Python, read after its backslash, as JSON has it."""
    character = yield from text.take()
    if character in _ESCAPES:
        return escaped(_ESCAPES[character])
    if character not in _NUM_HEX_DIGITS:
        return escaped(character if character in "\\'\"" else "\\" + character)
    digits = ""
    for _ in range(_NUM_HEX_DIGITS[character]):
        digits += yield from text.take()
    try:
        code = int(digits, 16)
        # Halves of a character come one by one, and belong together in JSON as well.
        return f"\\u{code:04x}" if code < 0x10000 else escaped(chr(code))
    except (ValueError, OverflowError):
        return escaped(f"\\{character}{digits}")


_ANY: Final = frozenset(TYPES)
_PYTHON: Final = LiteralSyntax(has_bare_words=False)


def json_of(text: str, types: frozenset[str]) -> str | None:
    """Return the JSON of a value of these types, written as JSON or as Python has it.

    None if it is neither; a text that may be a string is then that string.
    """
    written = text.strip()
    value = _json(written) or _PYTHON.read_literal(written)
    if value is None or types == _ANY:
        return value
    name = type_of(load_json(value))
    return value if "string" not in types or name in types - {"string"} else None


def _json(text: str) -> str | None:
    try:
        load_json(text)
    except ValueError:
        return None
    return text
