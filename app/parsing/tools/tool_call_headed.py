"""Tool calls whose name stands before their arguments in JSON."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from app.parsing.grammars.tool_grammar import Rules, argument_schema
from app.parsing.tool_call_reader import BLANKS, CallText, NotCallSyntax, Read, Steps
from app.parsing.tool_spec import ToolSpec
from app.parsing.tools.tool_call_json import JsonSyntax, pass_arguments

_ARGUMENTS: Final = "[ARGS]"
_ID: Final = "[CALL_ID]"
# Mistral's templates reject ids of any other length.
NUM_MISTRAL_ID_CHARACTERS: Final = 9

_KIMI_ARGUMENTS: Final = "<|tool_call_argument_begin|>"
_KIMI_START: Final = "<|tool_call_begin|>"
_KIMI_END: Final = "<|tool_call_end|>"
_KIMI_ID: Final = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


@dataclass(frozen=True, slots=True)
class MistralSyntax:
    """`name[ARGS]{...}`, in some models with an id before the arguments, and no end marker.

    Older models write a list of objects, which is read here as well.
    """

    has_ids: bool = False
    opening = closing = ""
    separator = None

    def rules(self, rules: Rules, name: str, tool: ToolSpec, *, is_bound: bool) -> None:
        head = rules.spell(tool.name)
        if self.has_ids:
            head += f" {rules.spell(_ID)} /[a-zA-Z0-9]{{{NUM_MISTRAL_ID_CHARACTERS}}}/"
        arguments = rules.json(f"{name}_json", argument_schema(tool, is_bound=is_bound))
        rules.add(name, f"{head} {rules.spell(_ARGUMENTS)} {arguments}")

    def reader(self, tools: Sequence[ToolSpec], start: str, end: str) -> Read:
        return self.read

    def read(self, text: CallText) -> Steps[None]:
        if (yield from text.after(BLANKS)) in "[{":
            yield from JsonSyntax().read(text)
            return
        name, call_id = (yield from text.word()), None
        if (yield from text.one_of(_ARGUMENTS, _ID)) == _ID:
            call_id = yield from text.word()
            yield from text.one_of(_ARGUMENTS)
        yield from _check_object(text)
        yield from pass_arguments(text, name, call_id)


@dataclass(frozen=True, slots=True)
class KimiSyntax:
    """`functions.name:0`, which is the id, and the arguments, between tokens of their own."""

    opening = closing = ""
    separator = ""

    def rules(self, rules: Rules, name: str, tool: ToolSpec, *, is_bound: bool) -> None:
        head = rules.spell(f"{_KIMI_START}functions.{tool.name}:")
        arguments = rules.json(f"{name}_json", argument_schema(tool, is_bound=is_bound))
        tail = f"{rules.spell(_KIMI_ARGUMENTS)} {arguments} {rules.spell(_KIMI_END)}"
        rules.add(name, f"{head} /[0-9]{{1,4}}/ {tail}")

    def reader(self, tools: Sequence[ToolSpec], start: str, end: str) -> Read:
        return self.read

    def read(self, text: CallText) -> Steps[None]:
        while (yield from text.one_of(_KIMI_START, text.end)) != text.end:
            yield from self._read_call(text)

    def _read_call(self, text: CallText) -> Steps[None]:
        call_id = (yield from text.head(_KIMI_ARGUMENTS)).strip()
        found = _KIMI_ID.fullmatch(call_id)
        if found is None:
            raise NotCallSyntax
        yield from _check_object(text, _KIMI_END)
        yield from pass_arguments(text, found[1], call_id, ends=(_KIMI_END, _KIMI_START))
        # Without its end, a call ends where another one or the section does.
        marker = yield from text.one_of(_KIMI_END, _KIMI_START, text.end, text.start)
        if marker == _KIMI_END:
            text.settle()
        else:
            text.put_back(marker)


def _check_object(text: CallText, *ends: str) -> Steps[None]:
    """Raise NotCallSyntax if no object follows, nor one of the markers in its place."""
    if (yield from text.after(BLANKS)) != "{":
        text.put_back((yield from text.one_of(*ends)))
