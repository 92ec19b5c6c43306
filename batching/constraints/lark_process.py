"""Writes Lark grammars as regular expressions, where rules do not refer to themselves.

Clients write them, so the work is linear in what is read and written, and bounded.  Should that ever be wrong, the
process is where it ends: this is a worker of `batching.sandbox`, which must not import anything of the project.
"""

import ast
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Final, NamedTuple

# In characters; a rule that is used twice is written twice.
_MAX_PATTERN: Final = 64 * 1024
_MAX_NESTING: Final = 24
_MAX_REASON: Final = 200

_COMMON: Final = {
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": r"[+\-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][+\-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+\-]?[0-9]+)?)",
    "NUMBER": r"(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+\-]?[0-9]+)?)",
    "SIGNED_NUMBER": r"(?:[+\-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+\-]?[0-9]+)?)",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
}

# No alternative looks far ahead and then takes little: at each character, that would take quadratic time.
_TOKEN: Final = re.compile(
    r"""
    (?P<blank> [ \t\r\f]+ | //[^\n]* | \#[^\n]* )
    | (?P<newline> \n )
    | (?P<string> "(?:[^"\\\n]|\\.)*"i? )
    | (?P<regex> /(?:[^/\\\n]|\\.)+/[imslux]* )
    | (?P<directive> %[a-z]+ )
    | (?P<name> [!?]{0,2}[A-Za-z_][A-Za-z0-9_-]* )
    | (?P<number> -?[0-9]+ )
    | (?P<sign> -> | \.\. | . )
    """,
    re.VERBOSE,
)
_STRING: Final = re.compile(
    r'"(?:[^"\\]|\\(?:["\\nrtbfv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}))*"'
)


class NotRegular(Exception):
    """A grammar that cannot be written as a regular expression; the text says why."""


class _Token(NamedTuple):
    kind: str
    text: str


_END: Final = _Token("newline", "\n")


def written_pattern(definition: str) -> str:
    """Return the regular expression of the texts that follow a grammar.

    Raises:
        NotRegular: there is none.
    """
    return _Grammar(definition).pattern()


def answer(line: bytes) -> bytes:
    """Return the expression of a grammar, or why there is none, as JSON."""
    try:
        return json.dumps({"pattern": written_pattern(json.loads(line))}).encode()
    except NotRegular as error:
        reason = str(error)[:_MAX_REASON]
    except RecursionError:
        reason = "it is nested too deep"
    return json.dumps({"reason": reason}).encode()


def literal_pattern(text: str) -> str:
    """Return the expression of a fixed text."""
    return "".join(_quoted_character(character) for character in text)


def _quoted_character(character: str) -> str:
    if character < " ":
        return rf"\x{ord(character):02x}"
    return f"\\{character}" if character in r"\.+*?()|[]{}^$/&-~#" else character


class _Grammar:
    """The statements of a Lark grammar, and the expressions of those that were looked up."""

    def __init__(self, text: str) -> None:
        self._bodies: dict[str, list[_Token]] = {}
        self._patterns: dict[str, str] = {}
        self._active: list[str] = []
        self._ignored = ""
        ignored: list[_Token] = []
        for statement in _statements(text):
            match statement:
                case [_Token("name", name), _Token(_, ":"), *body]:
                    self._bodies[name.lstrip("!?")] = body
                case [
                    _Token("name", name),
                    _Token(_, "."),
                    _Token("number"),
                    _Token(_, ":"),
                    *body,
                ]:
                    self._bodies[name.lstrip("!?")] = body
                case [
                    _Token("directive", "%import"),
                    _Token("name", "common"),
                    _Token(_, "."),
                    *names,
                ]:
                    self._import(names)
                case [_Token("directive", "%ignore"), *body]:
                    ignored += [*([_Token("sign", "|")] if ignored else []), *body]
                case _:
                    raise NotRegular(f"it has {' '.join(t.text for t in statement)[:60]!r}")
        if ignored:
            self._ignored = f"(?:{_Expression(self, ignored, is_terminal=True).pattern()})*"

    def pattern(self) -> str:
        return self.lookup("start") + self._ignored

    def lookup(self, name: str) -> str:
        """Return the expression of a rule or a terminal."""
        if name in self._active:
            raise NotRegular(f"its rule {name!r} refers to itself")
        if len(self._active) > _MAX_NESTING:
            raise NotRegular("its rules are nested too deep")
        if name not in self._patterns:
            if name not in self._bodies:
                raise NotRegular(f"it has no rule {name!r}")
            self._active.append(name)
            body = _Expression(self, self._bodies[name], is_terminal=_is_terminal(name))
            self._patterns[name] = f"(?:{body.pattern()})"
            self._active.pop()
        return self._patterns[name]

    def spaced(self, pattern: str) -> str:
        """Return a terminal of a rule, before which text may be ignored."""
        return self._ignored + pattern

    def _import(self, names: list[_Token]) -> None:
        match [token.text for token in names]:
            case [name] if name in _COMMON:
                self._patterns[name] = f"(?:{_COMMON[name]})"
            case [name, "->", alias] if name in _COMMON:
                self._patterns[alias] = f"(?:{_COMMON[name]})"
            case other:
                raise NotRegular(f"it imports {' '.join(other)[:60]!r}")


def _is_terminal(name: str) -> bool:
    return name.lstrip("_").isupper()


def _statements(text: str) -> Iterator[list[_Token]]:
    """Split a grammar into statements; one goes on in a line that begins with `|`."""
    statement: list[_Token] = []
    depth = 0
    tokens = [token for token in _tokens(text) if token.kind != "blank"]
    for token, following in pairwise([*tokens, _END]):
        if token.kind != "newline":
            statement.append(token)
            depth += (token.text in ("(", "[")) - (token.text in (")", "]"))
        elif statement and depth == 0 and following.kind != "newline" and following.text != "|":
            yield statement
            statement = []
    if statement:
        yield statement


def _tokens(text: str) -> Iterator[_Token]:
    for found in _TOKEN.finditer(text):
        # Looking for the end of each of them would take quadratic time.
        if found[0] in ('"', "/"):
            raise NotRegular(f"{found[0]} is not closed")
        yield _Token(str(found.lastgroup), found[0])


class _Written:
    """The parts of an expression, which together have a bounded length."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._length = 0

    def add(self, part: str) -> None:
        self._length += len(part)
        if self._length > _MAX_PATTERN:
            raise NotRegular("it is too long")
        self._parts.append(part)

    @property
    def pattern(self) -> str:
        return "".join(self._parts)


class _Expression:
    """Writes the right side of one statement as a regular expression."""

    def __init__(self, grammar: _Grammar, tokens: list[_Token], *, is_terminal: bool) -> None:
        self._grammar = grammar
        self._tokens = [*tokens, _END]
        self._position = 0
        self._depth = 0
        self._is_terminal = is_terminal

    def pattern(self) -> str:
        pattern = self._alternatives()
        if self._next != _END:
            raise NotRegular(f"it has {self._next.text!r} in a rule")
        return pattern

    @property
    def _next(self) -> _Token:
        return self._tokens[self._position]

    def _take(self) -> _Token:
        token = self._next
        self._position += 1
        return token

    def _takes(self, text: str) -> bool:
        is_next = self._next.kind == "sign" and self._next.text == text
        self._position += is_next
        return is_next

    def _expect(self, text: str) -> None:
        if not self._takes(text):
            raise NotRegular(f"{text!r} is missing in a rule")

    def _alternatives(self) -> str:
        written = _Written()
        written.add(self._sequence())
        while self._takes("|"):
            written.add(f"|{self._sequence()}")
        return written.pattern

    def _sequence(self) -> str:
        written = _Written()
        while self._next.kind in ("string", "regex", "name") or self._next.text in ("(", "["):
            written.add(self._repeated(self._atom()))
        if self._takes("->"):
            self._take()
        return written.pattern

    def _repeated(self, atom: str) -> str:
        for sign in "*+?":
            if self._takes(sign):
                return f"{atom}{sign}"
        if self._takes("~"):
            least = most = self._number()
            if self._takes(".."):
                most = self._number()
            return f"{atom}{{{least},{most}}}"
        return atom

    def _number(self) -> str:
        token = self._take()
        if token.kind != "number":
            raise NotRegular(f"{token.text!r} is no number of repetitions")
        return token.text

    def _atom(self) -> str:
        token = self._take()
        if token.kind == "name":
            return self._named(token.text.lstrip("!?"))
        if token.kind == "regex":
            return self._spaced(_regex(token.text))
        if token.kind == "string":
            return self._spaced(self._string(token.text))
        self._depth += 1
        if self._depth > _MAX_NESTING:
            raise NotRegular("its groups are nested too deep")
        inner = self._alternatives()
        self._depth -= 1
        self._expect(")" if token.text == "(" else "]")
        return f"(?:{inner})" + ("?" if token.text == "[" else "")

    def _named(self, name: str) -> str:
        pattern = self._grammar.lookup(name)
        return self._spaced(pattern) if _is_terminal(name) else pattern

    def _string(self, token: str) -> str:
        text = _text_of(token.removesuffix("i"))
        if self._takes(".."):
            last = _text_of(self._take().text)
            if len(text) != 1 or len(last) != 1:
                raise NotRegular("a range is between two characters")
            return f"[{literal_pattern(text)}-{literal_pattern(last)}]"
        flags = "i" if token.endswith("i") else ""
        return f"(?{flags}:{literal_pattern(text)})"

    def _spaced(self, pattern: str) -> str:
        # The count of its repetitions comes after it.
        return pattern if self._is_terminal else f"(?:{self._grammar.spaced(pattern)})"


def _text_of(token: str) -> str:
    if not _STRING.fullmatch(token):
        raise NotRegular(f"{token[:60]} is no string")
    try:
        return str(ast.literal_eval(token))
    except SyntaxError:
        # There are fewer characters than numbers.
        raise NotRegular(f"{token[:60]} is no string") from None


def _regex(token: str) -> str:
    pattern, _, flags = token[1:].rpartition("/")
    kept = "".join(sorted(set(flags) & set("imsx")))
    return f"(?{kept}:{pattern})"
