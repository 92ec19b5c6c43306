"""Grammars of gpt-oss's messages, as Lark text for llguidance."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from app.parsing.grammars.tool_grammar import argument_schema, length_budget, literal
from app.parsing.harmony.harmony_parser import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    FUNCTIONS,
    MARKERS,
    MESSAGE,
    RETURN,
    START,
)
from app.parsing.message_format import MessageSpec
from app.parsing.tool_spec import AllowedTools, ToolSpec, callable_tools
from batching import GrammarText, json_rule

ROLE: Final = "assistant"

# The parser takes a spelt marker for one, too.
_SPELT: Final = "|".join(map(re.escape, MARKERS))


@dataclass(frozen=True, slots=True)
class HarmonyGrammar:
    """Writes grammars of messages, each from its start marker on.

    tokens: the tokens of the markers.
    end_token_ids: the model's; these end any grammar.
    """

    tokens: Mapping[str, int]
    end_token_ids: frozenset[int]

    def of(self, spec: MessageSpec) -> GrammarText | None:
        """Return the grammar of a message; None if it is free."""
        if not (spec.is_call or spec.content or _are_calls_bound(spec)):
            return None
        if spec.is_call:
            spec = replace(spec, content=None)
        content = "TEXT" if spec.content is None else "@content"
        rules = [
            f"start: begin {_message(spec)}",
            f"begin: {self._token(START)} {literal(ROLE)}",
            f"analysis: {self._part('analysis')} TEXT {self._token(END)} begin",
            f"preamble: {self._part('commentary')} TEXT {self._token(END)} begin",
            f"final: {self._part('final')} {content} {self._end(RETURN)}",
            f"TEXT: /(.|\\n)*/ & ~/(.|\\n)*({_SPELT})(.|\\n)*/",
            *self._calls(spec),
        ]
        return _with_content("\n".join(rules), spec)

    def _calls(self, spec: MessageSpec) -> list[str]:
        tools = callable_tools(spec.tools, spec.tool_choice)
        names = [f"call_{index}" for index in range(len(tools))]
        rules = [f"call: {' | '.join(names)}"] if names else []
        is_bound = spec.is_call or spec.content is not None
        length = length_budget()
        for name, tool in zip(names, tools, strict=True):
            schema = argument_schema(tool, is_bound=is_bound or tool.strict)
            header = f"{self._recipient(tool)} {self._type()} {self._token(MESSAGE)}"
            rules.append(f"{name}: {header} {name}_json {self._end(CALL)}")
            rules.append(f"{name}_json: {json_rule(schema)}")
            length.take(len(rules[-1]))
        return rules

    def _recipient(self, tool: ToolSpec) -> str:
        """Return the two ways to write it; the second is that of the template."""
        commentary = f"{self._token(CHANNEL)} {literal('commentary')}"
        recipient = literal(f" to={FUNCTIONS}{tool.name}")
        return f"({commentary} {recipient} | {recipient} {commentary})"

    def _type(self) -> str:
        return f'(" "? {self._token(CONSTRAIN)} "json" | " json")?'

    def _part(self, channel: str) -> str:
        return f"{self._token(CHANNEL)} {literal(channel)} {self._token(MESSAGE)}"

    def _end(self, marker: str) -> str:
        """Return the end of the message; an end token is allowed in any case."""
        is_end_token = self.tokens[marker] in self.end_token_ids
        return "" if is_end_token else f"{self._token(marker)}?"

    def _token(self, marker: str) -> str:
        return f"<[{self.tokens[marker]}]>"


def _message(spec: MessageSpec) -> str:
    """Return what follows the first role.

    Where a call or a format is asked for, nothing but one part of analysis stands before it.
    """
    if spec.is_call:
        return "analysis? call"
    if spec.content is None:
        return "(analysis | preamble)* (call | final)"
    return "analysis? (call | final)" if spec.tools else "analysis? final"


def _are_calls_bound(spec: MessageSpec) -> bool:
    if isinstance(spec.tool_choice, AllowedTools):
        return bool(spec.tools)
    return any(tool.strict or tool.freeform is not None for tool in spec.tools)


def _with_content(rules: str, spec: MessageSpec) -> GrammarText:
    grammars: list[dict[str, Any]] = [{"lark_grammar": rules}]
    if spec.content is not None:
        content, *others = json.loads(spec.content.grammar)["grammars"]
        grammars += [content | {"name": "content"}, *others]
    return GrammarText(json.dumps({"grammars": grammars}))
