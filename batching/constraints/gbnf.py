"""llama.cpp's grammars (GBNF), rewritten for llguidance.

Both have rules, literals, character classes, groups and repetition, written in almost the same way, so
a grammar is translated token by token.  Each character of a text becomes a terminal of its own:
llguidance takes the longest terminal that matches, while a GBNF grammar means all its derivations.
"""

import re
from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

from batching.constraints.grammar_text import GrammarText, InvalidGrammar, lark_grammar

_TOKEN: Final = re.compile(
    r"""
      (?P<blank>   (?: \s | \#[^\n]* )+ )
    | (?P<head>    (?P<defined> [a-zA-Z0-9-]+ ) \s* ::= )
    | (?P<name>    [a-zA-Z0-9-]+ )
    | (?P<literal> " (?P<text> (?: [^"\\\n] | \\. )* ) " )
    | (?P<set>     \[ (?P<members> (?: [^\]\\\n] | \\. )* ) \] )
    | (?P<any>     \. )
    | (?P<token>   < (?: \[ [0-9]{1,9} \] | [^\s<>\[\]]+ ) > )
    | (?P<repeat>  [*+?] | \{ \s* [0-9]{1,9} \s* (?: , \s* (?: [0-9]{1,9} \s* )? )? \} )
    | (?P<open>    \( )
    | (?P<close>   \) )
    | (?P<or>      \| )
    """,
    re.VERBOSE,
)
_ESCAPE: Final = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL
)
_ESCAPED: Final = {"n": "\n", "r": "\r", "t": "\t"} | {c: c for c in '\\"[]-^'}
_ROOT: Final = "root"
# Tokens with which an expression can end; operators and ends need one before them.
_OPERANDS: Final = frozenset({"name", "literal", "set", "any", "token", "close"})


class _Token(NamedTuple):
    kind: str
    match: re.Match[str]


def gbnf_grammar(text: str) -> GrammarText:
    """Return the grammar of what a GBNF grammar derives from its rule `root`.

    Raises:
        InvalidGrammar: the text is malformed; its `param` is the field `grammar`.
    """
    try:
        return lark_grammar(_Translation(list(_tokens(text))).lark)
    except ValueError as error:
        raise InvalidGrammar("grammar", str(error)) from None


def _tokens(text: str) -> Iterator[_Token]:
    """Yield the tokens without blanks and comments: a rule ends where the next one begins."""
    position = 0
    while position < len(text):
        if (match := _TOKEN.match(text, position)) is None:
            line = text.count("\n", 0, position) + 1
            raise ValueError(f"line {line}: {text[position : position + 20]!r} is not GBNF")
        position = match.end()
        kind = match.lastgroup or ""
        if match["blank"] is None:
            yield _Token(kind, match)


class _Translation:
    """The rules of a grammar as lark text."""

    def __init__(self, tokens: list[_Token]) -> None:
        heads = [token.match["defined"] for token in tokens if token.match["head"]]
        self._names = {name: f"r_{index}" for index, name in enumerate(dict.fromkeys(heads))}
        if len(self._names) < len(heads):
            raise ValueError("a rule is defined twice")
        if _ROOT not in self._names:
            raise ValueError("there is no rule named root")
        self._parts = [f"start: {self._names[_ROOT]}"]
        self._depth = 0
        self._last = "end"
        for kind, match in tokens:
            self._add(kind, match)
        self._end_rule()

    @property
    def lark(self) -> str:
        return " ".join(self._parts)

    def _add(self, kind: str, match: re.Match[str]) -> None:
        match kind:
            case "head":
                if self._last != "end":
                    self._end_rule()
                self._parts.append(f"\n{self._names[match['defined']]}:")
            case _ if self._last == "end":
                raise ValueError(f"a rule must begin with a name and ::=, not {match[0][:20]!r}")
            case "open":
                self._depth += 1
                self._parts.append("(")
            case "close" | "or":
                self._end_sequence()
                self._depth -= kind == "close"
                self._parts.append(match[0])
            case "repeat":
                self._repeat(match[0])
            case _:
                self._parts.append(self._operand(kind, match))
        self._last = kind
        if self._depth < 0:
            raise ValueError("a ) has no (")

    def _end_rule(self) -> None:
        self._end_sequence()
        if self._depth:
            raise ValueError("a ( has no )")

    def _end_sequence(self) -> None:
        if self._last not in _OPERANDS and self._last != "repeat":
            self._parts.append('""')

    def _repeat(self, operator: str) -> None:
        if self._last not in _OPERANDS:
            raise ValueError(f"{operator} repeats nothing")
        self._parts.append("".join(operator.split()))

    def _operand(self, kind: str, match: re.Match[str]) -> str:
        match kind:
            case "name":
                if (name := self._names.get(match[0])) is None:
                    raise ValueError(f"there is no rule named {match[0][:40]!r}")
                return name
            case "literal":
                terminals = [_set([(point, point)]) for point, _ in _points(match["text"])]
                return f"({' '.join(terminals) or chr(34) * 2})"
            case "set":
                return _class(match["members"])
            case "any":
                return "/(?s:.)/"
            case _:
                return match[0]


def _points(text: str) -> list[tuple[int, bool]]:
    """Return the code points of a text, and whether each one stands for itself."""
    points: list[tuple[int, bool]] = []
    for match in _ESCAPE.finditer(text):
        *codes, escaped, plain = match.groups()
        code = next(filter(None, codes), None)
        if code is not None:
            points.append((int(code, 16), False))
        elif escaped is None:
            points.append((ord(plain), True))
        elif escaped in _ESCAPED:
            points.append((ord(_ESCAPED[escaped]), False))
        else:
            raise ValueError(f"there is no escape {match[0]!r}")
        if points[-1][0] > 0x10FFFF or 0xD800 <= points[-1][0] < 0xE000:
            raise ValueError(f"{match[0]} is no character")
    return points


def _class(members: str) -> str:
    is_negated = members.startswith("^")
    points = deque(_points(members.removeprefix("^")))
    ranges: list[tuple[int, int]] = []
    while points:
        first = last = points.popleft()[0]
        # A hyphen at the end stands for itself.
        if len(points) > 1 and points[0] == (ord("-"), True):
            points.popleft()
            last = points.popleft()[0]
        if last < first:
            raise ValueError(f"the range in [{members[:40]}] is empty")
        ranges.append((first, last))
    if not ranges:
        raise ValueError("a character class is empty")
    return _set(ranges, is_negated=is_negated)


def _set(ranges: list[tuple[int, int]], *, is_negated: bool = False) -> str:
    members = "".join(f"\\u{{{first:x}}}-\\u{{{last:x}}}" for first, last in ranges)
    return f"/[{'^' * is_negated}{members}]/"
