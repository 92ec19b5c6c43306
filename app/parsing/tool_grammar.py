"""Grammars of completions with tool calls, as Lark text for llguidance."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from app.parsing.tool_spec import ToolSpec
from batching import GrammarText, InvalidRequest, json_rule, lark_grammar

_ANY_OBJECT: Final = {"type": "object"}

# What parameters in plain text can keep; they have no quotes, hence no escapes either.
_TEXT_KEYWORDS: Final = frozenset(
    {"type", "title", "description", "default", "examples", "enum", "const"}
)


@dataclass(frozen=True, slots=True)
class Marker:
    """A text in a model's output; `token_id` is set if one token of its own stands for it.

    llguidance takes such a token by its number only, not by its text.
    """

    text: str
    token_id: int | None = None

    @property
    def symbol(self) -> str:
        return literal(self.text) if self.token_id is None else f"<[{self.token_id}]>"


class CallSyntax(Protocol):
    """What stands between the markers: `opening call (separator call)* closing`.

    Without a separator there is one call between two markers.  All are lark expressions.
    """

    @property
    def opening(self) -> str: ...

    @property
    def closing(self) -> str: ...

    @property
    def separator(self) -> str | None: ...

    def rules(self, name: str, tool: ToolSpec, *, is_bound: bool) -> list[str]:
        """Return the rule `name` for a call of the tool, and what it needs.

        Where the arguments are not bound to the tool's schema, any object will do.
        """
        ...


@dataclass(frozen=True, slots=True)
class JsonSyntax:
    """The arguments are JSON; `before_name` is a text, the others are lark expressions."""

    before_name: str
    after_name: str
    after_arguments: str
    opening: str = ""
    closing: str = ""
    separator: str | None = None

    def rules(self, name: str, tool: ToolSpec, *, is_bound: bool) -> list[str]:
        schema = tool.parameters if is_bound else _ANY_OBJECT
        begin = literal(self.before_name + tool.name)
        return [
            f"{name}: {begin} {self.after_name} {name}_json {self.after_arguments}",
            f"{name}_json: {json_rule(schema)}",
        ]


@dataclass(frozen=True, slots=True)
class ParameterSyntax:
    """Each parameter stands between tags of its own, as in Qwen3-Coder's format.

    Strings are plain text there, so of a string's schema only `enum` and `const` can be
    enforced; other types are JSON.  The parameters come in the schema's order, and the arguments
    are always bound to the schema: the format of any other parameter is unknown.
    """

    opening: str = ""
    closing: str = ""
    separator: str | None = None

    def rules(self, name: str, tool: ToolSpec, *, is_bound: bool) -> list[str]:
        schema = tool.parameters
        properties: Mapping[str, Any] = schema.get("properties", {})
        required = schema.get("required", [])
        rules, parts = [], []
        for index, (key, value) in enumerate(properties.items()):
            part = f"{name}_{index}"
            parts.append(part if key in required else f"{part}?")
            rules.append(f"{part}: {literal(f'<parameter={key}>')} {part}_value")
            rules += self._value(f"{part}_value", tool, value, schema)
        begin, end = literal(f"\n<function={tool.name}>\n"), literal("</function>\n")
        return [f"{name}: {begin} {' '.join(parts)} {end}", *rules]

    def _value(self, name: str, tool: ToolSpec, value: Any, schema: Mapping[str, Any]) -> list[str]:
        end = literal("\n</parameter>\n")
        if not isinstance(value, dict) or value.get("type") != "string":
            return [f'{name}: "\\n" {name}_json {end}', f"{name}_json: {_nested(value, schema)}"]
        if tool.strict and (kept := sorted(set(value) - _TEXT_KEYWORDS)):
            message = f"{kept[0]!r} of a string cannot be enforced in this model's format"
            raise InvalidRequest("tools", message)
        choices = value.get("enum", [value["const"]] if "const" in value else None)
        if choices is None:
            return [f'{name}: "\\n" {name}_text', f"{name}_text[lazy]: TEXT {end}"]
        texts = " | ".join(literal(str(choice)) for choice in choices)
        return [f'{name}: "\\n" ({texts}) {end}']


def tool_grammar(
    syntax: CallSyntax,
    start: Marker,
    end: Marker,
    tools: Sequence[ToolSpec],
    *,
    is_forced: bool,
    is_parallel: bool,
) -> GrammarText:
    """Return a grammar of calls, or else of free text in which only calls are bound.

    The arguments of all tools are enforced where a call is forced, elsewhere of the strict ones.
    """
    calls = [f"call_{index}" for index in range(len(tools))]
    more_calls = f"({syntax.separator} call)*" if is_parallel and syntax.separator else ""
    end_symbol = end.symbol if end.text else ""
    rules = [
        _forced_start(syntax, start, is_parallel) if is_forced else _free_start(start, is_parallel),
        "TEXT: /(.|\\n)*/",
        f"section: {syntax.opening} call {more_calls} {syntax.closing} {end_symbol}",
        f"call: {' | '.join(calls)}",
    ]
    for name, tool in zip(calls, tools, strict=True):
        is_bound = is_forced or tool.strict
        rules += syntax.rules(name, tool, is_bound=is_bound)
    return lark_grammar("\n".join(rules))


def _forced_start(syntax: CallSyntax, start: Marker, is_parallel: bool) -> str:
    has_sections = is_parallel and syntax.separator is None
    more_sections = f'("\\n"? {start.symbol} section)*' if has_sections else ""
    return f"start: {start.symbol} section {more_sections}"


def _free_start(start: Marker, is_parallel: bool) -> str:
    """Return rules of text that is free until a start marker, also until a spelt one."""
    has_token = start.token_id is not None
    head = f"TEXT? {start.symbol} | spelt" if has_token else "spelt"
    content = "(head section)* TEXT?" if is_parallel else "head section | TEXT?"
    return f"start: {content}\nhead: {head}\nspelt[lazy]: TEXT {literal(start.text)}"


def _nested(schema: Any, root: Mapping[str, Any]) -> str:
    """Return the rule of a schema inside another one, whose definitions it may refer to."""
    if not isinstance(schema, dict):
        return json_rule(schema)
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return json_rule(definitions | schema)


def literal(text: str) -> str:
    """Return a text as lark has it."""
    return json.dumps(text, ensure_ascii=False)
