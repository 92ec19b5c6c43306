"""Tool calls in JSON: `{"name": ..., "arguments": {...}}`, one or a list of them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from app.parsing.grammars.tool_grammar import Rules, argument_schema
from app.parsing.tool_call_reader import BLANKS, CallText, NotCallSyntax, Read, Steps
from app.parsing.tool_spec import ToolSpec
from app.parsing.tools.json_text import json_value, pass_json

_BEFORE_ID: Final = ', "id": "'
_AFTER_ID: Final = '"'
_ARGUMENT_KEYS: Final = frozenset({"arguments", "parameters"})


@dataclass(frozen=True, slots=True)
class JsonSyntax:
    """Objects between the markers, or without an end marker a list of them.

    Frequent errors of models are corrected where the intention is clear: line breaks inside
    strings, brackets too many or too few at the end, arguments that are null, empty, missing or the
    text of an object.  An id that follows the arguments comes too late to be the call's.
    """

    before: str = "\n"
    after: str = "\n"
    opening: str = ""
    closing: str = ""
    separator: str | None = None
    num_id_characters: int | None = None

    def rules(self, rules: Rules, name: str, tool: ToolSpec, *, is_bound: bool) -> None:
        begin = rules.spell(f'{self.before}{{"name": "{tool.name}", "arguments": ')
        arguments = rules.json(f"{name}_json", argument_schema(tool, is_bound=is_bound))
        call_id = ""
        if self.num_id_characters is not None:
            text = f"/[a-zA-Z0-9]{{{self.num_id_characters}}}/"
            call_id = f"({rules.spell(_BEFORE_ID)} {text} {rules.spell(_AFTER_ID)})?"
        rules.add(name, f"{begin} {arguments} {call_id} {rules.spell('}' + self.after)}")

    def reader(self, tools: Sequence[ToolSpec], start: str, end: str) -> Read:
        return self.read

    def read(self, text: CallText) -> Steps[None]:
        has_call = False
        while True:
            character = yield from text.peek()
            if character in BLANKS or character in (",]}" if has_call else "["):
                yield from text.take()
                # Calls may be in a list, and a model may close more than it opened.
                if not text.end and character == "]":
                    return
            elif character == "{":
                yield from text.take()
                yield from _read_object(text)
                has_call = True
            elif has_call and text.end:
                yield from text.one_of(text.end)
                return
            else:
                raise NotCallSyntax


def _read_object(text: CallText) -> Steps[None]:
    """Read a call after its `{`, up to where it ceases to be JSON."""
    arguments: str | None = None
    has_call = False
    while (yield from text.after(BLANKS + ",")) == '"':
        key = _string((yield from json_value(text)))
        character = yield from text.after(BLANKS + ":")
        if key in _ARGUMENT_KEYS and character == "{" and text.name and not has_call:
            yield from pass_arguments(text, text.name)
            has_call = True
            continue
        value = yield from json_value(text)
        if key == "name" and not has_call:
            text.name = _string(value)
        elif key in _ARGUMENT_KEYS:
            arguments = _object_text(value)
        if text.name and arguments is not None and not has_call:
            has_call = _whole_call(text, text.name, arguments)
    if (yield from text.peek()) == "}":
        yield from text.take()
        has_call = has_call or (text.name is not None and _whole_call(text, text.name, "{}"))
        if has_call:
            text.settle()
    if not has_call:
        raise NotCallSyntax


def pass_arguments(
    text: CallText, name: str, call_id: str | None = None, *, ends: Sequence[str] = ()
) -> Steps[None]:
    """Read a call from its arguments on; a marker that cuts them short stays the next."""
    text.begin(name, call_id)
    markers = [*ends, *filter(None, [text.end]), text.start]
    text.put_back((yield from pass_json(text, text.write, markers)))
    text.finish()


def _whole_call(text: CallText, name: str, arguments: str) -> bool:
    text.begin(name)
    text.write(arguments)
    text.finish()
    return True


def _string(text: str) -> str | None:
    """Return the value of a JSON string; None if it is not one or is empty."""
    try:
        value = json.loads(text) if text.startswith('"') else None
    except ValueError:
        return None
    # JSON can express half of a surrogate pair, which no response can be written with.
    if not value:
        return None
    return str(value).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _object_text(text: str) -> str:
    """Return arguments as the text of an object if they are null or a string with that text."""
    return "{}" if text in ("null", '""') else _string(text) or text
