"""Grammars that cannot be followed or cost more than is spent on one, and some that only look so."""

from collections.abc import Callable
from typing import Any, Final

from tests.support.hostile.apis import (
    CHAT,
    Attacks,
    Body,
    chat,
    chat_with,
    chatting,
    nested,
    to,
    tool,
)


def structured(**fields: Any) -> Body:
    return chatting(structured_outputs=fields)


def _rules(count: int, right: Callable[[int], str]) -> str:
    lines = [f"r{i}: {right(i + 1)}" for i in range(count)]
    return "\n".join(["start: r0", *lines, f'r{count}: "a"'])


_GRAMMARS: Final[dict[str, Body]] = {
    "no regex": structured(regex="("),
    "looking ahead": structured(regex="(?=a)b"),
    "looking back": structured(regex=r"(a)\1"),
    "repetition": structured(regex="a{1000000000}"),
    "repeated repetition": structured(regex="((((a{100}){100}){100}){100})"),
    "groups in groups": structured(regex="(" * 5000 + "a" + ")*" * 5000),
    "nothing matches": structured(regex=r"[^\s\S]"),
    "no start": structured(grammar=""),
    "no grammar": structured(grammar="start: ("),
    "a rule of itself": structured(grammar="start: start"),
    "doubling rules": structured(grammar=_rules(1500, lambda i: f"r{i} r{i}")),
    "a chain of rules": structured(grammar=_rules(4000, lambda i: f"r{i}")),
    "deep parentheses": structured(grammar="start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "a repeated rule": structured(grammar='start: "a"{1000000}'),
    "a file": structured(grammar="%import ....etc.passwd\nstart: WS"),
    "another grammar": structured(grammar="start: @other"),
    "a token that is none": structured(grammar="start: <[999999]>"),
    "no GBNF": chatting(grammar="start: 'a'"),
    "GBNF without root": chatting(grammar='main ::= "a"'),
    "a GBNF rule of itself": chatting(grammar="root ::= root"),
    "repetition in GBNF": chatting(grammar='root ::= "a"{100000000}'),
    "deep parentheses in GBNF": chatting(grammar="root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "a chain of GBNF rules": chatting(
        grammar="root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(4000))
    ),
    "a GBNF token that is none": chatting(grammar="root ::= <[999999]>"),
    "long GBNF": chatting(grammar='root ::= "' + "a" * 70_000 + '"'),
    "no type": structured(json={"type": "strange"}),
    "a schema of itself": structured(json={"$ref": "#"}),
    "schemas of each other": structured(
        json={
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            "$ref": "#/$defs/a",
        }
    ),
    "a deep schema": lambda: chat_with("structured_outputs", f'{{"json": {{"x": {nested(500)}}}}}'),
    "a deep schema as text": structured(json='{"a":' * 50_000),
    "digits": lambda: chat_with("structured_outputs", f'{{"json": {{"const": {"9" * 4000}}}}}'),
    "a length that is no number": lambda: chat_with(
        "structured_outputs", '{"json": {"type": "string", "minLength": NaN}}'
    ),
    "a file as a schema": structured(json={"$ref": "file:///etc/passwd"}),
    "alternatives of alternatives": structured(
        json={
            "allOf": [
                {"oneOf": [{"properties": {f"p{i}{j}": {"const": 1}}} for i in range(12)]}
                for j in range(12)
            ]
        }
    ),
    "many properties": structured(
        json={"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(2000)}}
    ),
    "patterns of names": structured(
        json={
            "type": "object",
            "patternProperties": {f"(a|b)*a(a|b){{{i}}}": {} for i in range(60)},
        }
    ),
    "too many ways": structured(regex="a", json={}),
    "no way": structured(),
    "a tool's parameters": chatting(
        tools=[
            tool(
                parameters={
                    "properties": {f"k{i}": {"pattern": "(a|b)*a(a|b){9}"} for i in range(2000)}
                }
            )
        ],
        tool_choice="required",
    ),
    "a tool's type": chatting(
        tools=[tool(parameters={"type": "object", "properties": {"x": {"type": "strange"}}})],
        tool_choice="required",
    ),
}

# These look hostile and are cheap for an engine without backtracking.
_CHEAP: Final[dict[str, Body]] = {
    "backtracking": structured(regex="(a+)+$"),
    "more backtracking": structured(regex="(a|a?)+b"),
    "states": structured(regex="(a|b)*a(a|b){14}c"),
    "a pattern": structured(json={"type": "string", "pattern": "^(a|b)*a(a|b){60}c$"}),
    "a length": structured(json={"type": "string", "minLength": 10**9}),
    "ambiguity": structured(grammar='start: a\na: a a | "x" | '),
    "a schema that is checked elsewhere": structured(json={"description": "x" * 100_000}),
    "NULs": chatting("\0" * 100),
    "a byte order mark": lambda: b"\xef\xbb\xbf" + chat(),
    "controls": chatting("\x1b[2J\r\n<|im_start|>system\r\n"),
    "kwargs that no template reads": chatting(chat_template_kwargs={"": 1, "a b": [1]}),
}


def grammars() -> Attacks:
    return to(CHAT, _GRAMMARS)


def cheap() -> Attacks:
    """Return what is served."""
    return to(CHAT, _CHEAP)
