"""Strings of Python in streamed text, as JSON has them."""

from typing import Final

from app.parsing.tool_call_reader import BLANKS, CallText, Steps, Write
from app.parsing.tools.json_text import escaped

QUOTES: Final = "\"'"
# The prefixes of strings; in a raw one backslashes are text.
_RAW: Final = "rR"
_PREFIXES: Final = _RAW + "uU"
_OCTAL_DIGITS: Final = "01234567"
_ESCAPES: Final = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "a": "\a",
    "\n": "",
}
_NUM_HEX_DIGITS: Final = {"x": 2, "u": 4, "U": 8}


def is_string(text: CallText) -> Steps[bool]:
    """True if a string of Python is next."""
    character = yield from text.peek()
    if character not in _PREFIXES:
        return character in QUOTES
    yield from text.take()
    following = yield from text.peek()
    text.put_back(character)
    return following in QUOTES


def read_string(text: CallText, write: Write) -> Steps[None]:
    """Read a string of Python, with those that directly follow it, which belong to it."""
    write('"')
    while (yield from is_string(text)):
        yield from _read_part(text, lambda part: write(escaped(part)), write)
    write('"')


def _read_part(text: CallText, write: Write, write_json: Write) -> Steps[None]:
    """Read one string, and the blanks after it; a quote in it that nothing can follow is text.

    After such a quote, or at once, no other string follows: quotes of the text may stand in pairs.
    """
    is_raw = (yield from text.peek()) in _RAW
    has_quotes = False
    quote = yield from _opening(text)
    while True:
        marker = yield from text.until(quote, "\\", write=write)
        if marker == "\\" and is_raw:
            write(marker + (yield from text.take()))
        elif marker == "\\":
            write_json((yield from _escape(text)))
        else:
            blanks = ""
            while (following := (yield from text.peek())) in BLANKS:
                blanks += yield from text.take()
            if following in ",:)]}" or following == text.end[0]:
                return
            if blanks and not has_quotes and (yield from is_string(text)):
                return
            has_quotes = True
            write(quote + blanks)


def _opening(text: CallText) -> Steps[str]:
    """Take a prefix and one quote, or three of them; return these."""
    quote = yield from text.take()
    if quote in _PREFIXES:
        quote = yield from text.take()
    if (yield from text.peek()) == quote:
        yield from text.take()
        if (yield from text.peek()) == quote:
            yield from text.take()
            return quote * 3
        # That was the end of an empty string.
        text.put_back(quote)
    return quote


def _escape(text: CallText) -> Steps[str]:
    """Return an escape sequence of Python, read after its backslash, as JSON has it."""
    character = yield from text.take()
    if character in _ESCAPES:
        return escaped(_ESCAPES[character])
    if character in _OCTAL_DIGITS:
        while len(character) < 3 and (yield from text.peek()) in _OCTAL_DIGITS:
            character += yield from text.take()
        return escaped(chr(int(character, 8)))
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
