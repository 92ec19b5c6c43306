"""Grammars of completions with tool calls, as Lark text for llguidance."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from app.parsing.grammars.budget import Budget
from app.parsing.grammars.freeform import ANY_TEXT, pattern_of
from app.parsing.grammars.schema_types import Schema, Schemas, keyword_budget
from app.parsing.tool_call_reader import Read
from app.parsing.tool_spec import FreeformInput, ToolSpec, freeform_parameters
from batching import GrammarText, InvalidRequest, NotRegular, json_rule, literal_pattern

_ANY_OBJECT: Final = {"type": "object"}

# In characters.
_MAX_LENGTH: Final = 512 * 1024

# Keywords that strings in plain text can keep; they have no quotes, hence no escapes either.
TEXT_KEYWORDS: Final = frozenset(
    {"type", "title", "description", "default", "examples", "enum", "const", "$defs", "definitions"}
)


def length_budget() -> Budget:
    """Return how long the rules of all tools of a request may be together."""
    return Budget(_MAX_LENGTH, "characters as a grammar")


class CallSyntax(Protocol):
    """How a format writes and reads what stands between its markers.

    It is `opening call (separator call)* closing`, all of them fixed texts; without a separator
    there is one call between two markers.
    """

    @property
    def opening(self) -> str: ...

    @property
    def closing(self) -> str: ...

    @property
    def separator(self) -> str | None: ...

    def rules(self, rules: "Rules", name: str, tool: ToolSpec, *, is_bound: bool) -> None:
        """Add the rule `name` for a call of the tool.

        Where the arguments are not bound to the tool's schema, any object will do if the format
        can say so.

        Raises:
            InvalidRequest: the tool's arguments cannot be enforced in this format.
        """
        ...

    def reader(self, tools: Sequence[ToolSpec], start: str, end: str) -> Read:
        """Return what reads calls of these tools between two markers.

        This looks through the tools' schemas, so that reading does not: not on the event loop.
        """
        ...


class Rules:
    """The rules of a grammar; the methods return lark expressions.

    tokens: markers inside calls that are single tokens of the model.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        self._keywords = keyword_budget()
        self._length = length_budget()
        self._lines = ["TEXT: /(.|\\n)*/", "BREAK: /\\n/"]
        self._names: set[str] = set()
        self._grammars: list[dict[str, str]] = []
        self._is_split_by = re.compile("|".join(map(re.escape, tokens)) or "(?!)")

    def schemas(self, root: Schema) -> Schemas:
        """Return what reads the schemas in one, within the limit of all schemas of the grammar."""
        return Schemas(root, self._keywords)

    def has(self, name: str) -> bool:
        return name in self._names

    def add(self, name: str, body: str) -> str:
        return self.choice(name, [body])

    def choice(self, name: str, alternatives: Iterable[str], *, before: str = "") -> str:
        """Add a rule of alternatives; `before` stands before each.

        Their length counts before the next one is written: a schema can ask for each part of it again and again.
        """
        self._length.take(len(name) + len(before))
        written: list[str] = []
        for alternative in alternatives:
            self._length.take(len(alternative))
            written.append(alternative)
        body = " | ".join(written)
        self._names.add(name)
        self._lines.append(f"{name}: {before} ({body})" if before else f"{name}: {body}")
        return name

    def spell(self, text: str) -> str:
        """Return a fixed text, by the numbers of its markers."""
        return " ".join(self._symbols(text)) or '""'

    def json(self, name: str, schema: Schema | bool) -> str:
        return self.add(name, json_rule(schema))

    def text(self, name: str, end: str, pattern: str | None = None) -> str:
        """Return any text, or what matches a pattern, up to the first `end`, and `end`."""
        before, token_id, rest = self._split(end)
        if token_id is None:
            body = "TEXT" if pattern is None else f"/(?:{pattern})/"
            return self.add(f"{name}[lazy]", f"{body} {literal(end)}").removesuffix("[lazy]")
        # Text cannot hold the token, so it may hold what stands before that.
        body = "TEXT" if pattern is None else f"/(?:{pattern}){literal_pattern(before)}/"
        return self.add(name, f"{body} <[{token_id}]> {self.spell(rest)}")

    def free_text(self, start: str) -> str:
        """Return any text without a start marker, but with tags that begin as that does."""
        before, token_id, rest = self._split(start)
        if before or not rest:
            return "TEXT?"
        others = (f"<[{other}]>" for other in self._tokens.values() if other != token_id)
        self.add("OTHER", f"/[^{literal_pattern(rest[0])}](.|\\n)*/")
        self.add("SOME_TEXT", "/(.|\\n)+/")
        return self.add("free", f"(SOME_TEXT | <[{token_id}]> OTHER | {' | '.join(others)})*")

    def freeform(self, name: str, freeform: FreeformInput, end: str) -> str:
        """Return the text that a definition asks for, and `end`."""
        try:
            pattern = pattern_of(freeform)
        except NotRegular:
            self._length.take(len(freeform.definition))
            self._grammars.append({"name": name, "lark_grammar": freeform.definition})
            return f"@{name} {self.spell(end)}"
        return self.text(name, end, None if pattern == ANY_TEXT else pattern)

    def grammar(self) -> GrammarText:
        grammars = [{"lark_grammar": "\n".join(self._lines)}, *self._grammars]
        return GrammarText(json.dumps({"grammars": grammars}))

    def _split(self, text: str) -> tuple[str, int | None, str]:
        found = self._is_split_by.search(text)
        if found is None:
            return text, None, ""
        return text[: found.start()], self._tokens[found[0]], text[found.end() :]

    def _symbols(self, text: str) -> Iterator[str]:
        position = 0
        for found in self._is_split_by.finditer(text):
            if before := text[position : found.start()]:
                yield literal(before)
            yield f"<[{self._tokens[found[0]]}]>"
            position = found.end()
        if rest := text[position:]:
            yield literal(rest)


def argument_schema(tool: ToolSpec, *, is_bound: bool) -> Schema:
    """Return the schema that the arguments follow in a format in which they are JSON.

    Raises:
        InvalidRequest: the input follows a grammar that JSON cannot enforce.
    """
    if tool.freeform is None:
        return tool.parameters if is_bound else _ANY_OBJECT
    return freeform_parameters(text_schema(tool.name, tool.freeform))


def text_schema(tool_name: str, freeform: FreeformInput) -> Schema:
    """Return the schema of a string that follows a definition."""
    try:
        pattern = pattern_of(freeform)
    except NotRegular as error:
        message = f"the grammar of {tool_name!r} cannot be enforced in this model's format of calls"
        raise InvalidRequest("tools", f"{message}: {error}") from None
    return {"type": "string"} | ({} if pattern == ANY_TEXT else {"pattern": f"^(?:{pattern})$"})


def check_key(key: str, pattern: re.Pattern[str]) -> None:
    """Raise InvalidRequest for the name of a parameter that the format cannot hold."""
    if not pattern.fullmatch(key):
        message = f"a parameter named {key[:60]!r} cannot be enforced in this model's format"
        raise InvalidRequest("tools", message)


def check_strict_text(variants: Iterable[Schema]) -> None:
    """Raise InvalidRequest for what the schema of a text asks for beside that."""
    for variant in variants:
        if kept := sorted(set(variant) - TEXT_KEYWORDS):
            message = f"{kept[0]!r} of a string cannot be enforced in this model's format"
            raise InvalidRequest("tools", message)


def tool_grammar(
    syntax: CallSyntax,
    start: str,
    end: str,
    tools: Sequence[ToolSpec],
    *,
    tokens: Mapping[str, int],
    is_forced: bool,
    is_parallel: bool,
) -> GrammarText:
    """Return a grammar of calls, or else of free text in which only calls are bound.

    The arguments of all tools are enforced where a call is forced, elsewhere of the strict ones.
    The text of a freeform tool always is.
    """
    rules = Rules(tokens)
    if is_forced:
        rules.add("start", _forced_start(rules, syntax, start, is_parallel))
    else:
        _add_free_start(rules, start, is_parallel)
    has_separator = is_parallel and syntax.separator is not None
    more = f"({rules.spell(syntax.separator or '')} call)*" if has_separator else ""
    opening, closing = rules.spell(syntax.opening), rules.spell(syntax.closing)
    rules.add("section", f"{opening} call {more} {closing} {rules.spell(end)}")
    calls = [f"call_{index}" for index in range(len(tools))]
    rules.add("call", " | ".join(calls))
    for name, tool in zip(calls, tools, strict=True):
        syntax.rules(rules, name, tool, is_bound=is_forced or tool.strict)
    return rules.grammar()


def _forced_start(rules: Rules, syntax: CallSyntax, start: str, is_parallel: bool) -> str:
    has_sections = is_parallel and syntax.separator is None
    begin = rules.spell(start)
    return f"{begin} section {f'(BREAK? {begin} section)*' if has_sections else ''}"


def _add_free_start(rules: Rules, start: str, is_parallel: bool) -> None:
    """Add rules of text that is free until a start marker, also until a spelt one."""
    free = rules.free_text(start)
    rules.add("start", f"(head section)* {free}" if is_parallel else f"head section | {free}")
    spelt = rules.add("spelt[lazy]", f"TEXT {literal(start)}").removesuffix("[lazy]")
    begin = rules.spell(start)
    rules.add("head", spelt if begin == literal(start) else f"{free} {begin} | {spelt}")


def literal(text: str) -> str:
    """Return a text as lark has it."""
    return json.dumps(text, ensure_ascii=False)
