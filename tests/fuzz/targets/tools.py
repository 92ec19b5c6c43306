"""Tools that a client defines: their grammar, a text that follows it, and the calls read from that.

An input is JSON: `format`, as mlx-lm names them, `tools` as in a chat request, `is_parallel`, and the `seed`
of the text.
"""

import json
from collections.abc import Sequence
from random import Random
from typing import Any, Final

import jsonschema
import numpy as np
from pydantic import TypeAdapter, ValidationError
from referencing.exceptions import Unresolvable

from app.api.openai.schemas.tool_calling.tools import ToolList
from app.parsing.events import ToolCallArguments, ToolCallStart, join_pieces
from app.parsing.tool_spec import ToolSpec
from app.parsing.tools.tool_format import ToolFormat
from batching import InvalidRequest
from batching.constraints.grammar import Grammar
from batching.constraints.grammar_text import json_object_grammar
from tests.fuzz.mutations import json_mutation
from tests.fuzz.target import Target, pieces_of
from tests.support.tool_formats import COMPILER, END_ID, FORMATS, VOCAB_SIZE, VOCABULARY

_TOOLS: Final = TypeAdapter(ToolList)
_MAX_TOKENS: Final = 300
# Their arguments follow all of the schema; elsewhere the parameters have types that it allows.
_JSON: Final = ("general", "json_tools", "kimi_k2", "mistral", "mistral_args", "mistral_ids")
_NAMES: Final = sorted(FORMATS)
_WORDS: Final = (
    *("type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf"),
    *("oneOf", "allOf", "$ref", "$defs", "#/$defs/a", "#", "pattern", "^[a-z]+$", "minLength"),
    *("maxLength", "minItems", "maxItems", "minimum", "maximum", "multipleOf", "format", "date"),
    *("object", "array", "string", "integer", "number", "boolean", "null", "strict", "default"),
    *("patternProperties", "not", "description", "</parameter>", "\n", '"', "<", "é"),
    {"$ref": "#/$defs/a"},
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    {"type": ["integer", "null"]},
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "number"}}]},
    {"type": "custom", "custom": {"name": "c"}},
    {"syntax": "lark", "definition": "start: /a+/"},
    {"syntax": "regex", "definition": "[a-z]{1,3}"},
    *_NAMES,
)

# Its process is started before there are limits.
COMPILER.compile(json_object_grammar(), param="tools")


def run(data: bytes) -> None:
    """A text that follows the grammar is calls of the tools, with what these require."""
    try:
        given = json.loads(data)
        tools = [tool.to_spec() for tool in _TOOLS.validate_python(given["tools"])]
        format_ = FORMATS[given["format"]]
        is_parallel, seed = bool(given["is_parallel"]), int(given["seed"])
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError, ValidationError):
        return
    if not tools:
        return
    try:
        grammar = format_.grammar(tools, "required", is_parallel=is_parallel)
        assert grammar is not None
        compiled = COMPILER.compile(grammar, param="tools")
    except InvalidRequest:
        return
    text, is_whole = _walked(compiled, seed)
    calls = _calls(format_, tools, [text])
    assert _calls(format_, tools, pieces_of(text)) == calls
    if is_whole:
        assert calls, text
        for name, arguments in calls:
            _check(tools, name, arguments, is_json=given["format"] in _JSON)


def _walked(grammar: Grammar, seed: int) -> tuple[str, bool]:
    """Return a text that follows a grammar, and whether it may end there."""
    matcher, model = grammar.matcher(), Random(seed)
    ids: list[int] = []
    row = np.zeros(-(-VOCAB_SIZE // 32), np.int32)
    while len(ids) < _MAX_TOKENS:
        matcher.fill_mask(row)
        # A grammar may become too wide: an error of that request.
        if matcher.error is not None:
            return VOCABULARY.decode(ids, False), False
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        if END_ID in allowed:
            return VOCABULARY.decode(ids, False), True
        ids.append(int(model.choice(allowed)))
        matcher.accept(ids[-1])
    return VOCABULARY.decode(ids, False), False


def _calls(
    format_: ToolFormat, tools: Sequence[ToolSpec], pieces: Sequence[str]
) -> list[tuple[str, str]]:
    """Return the names and the arguments of the calls in a text."""
    parser = format_.parsers(tools, new_id=lambda: "id")()
    events = [event for piece in pieces for event in parser.add(piece)]
    calls: list[tuple[str, str]] = []
    for event in join_pieces([*events, *parser.flush()]):
        if isinstance(event, ToolCallStart):
            calls.append((event.name, ""))
        elif isinstance(event, ToolCallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return calls


def _check(tools: Sequence[ToolSpec], name: str, arguments: str, *, is_json: bool) -> None:
    [tool] = [tool for tool in tools if tool.name == name]
    value: Any = json.loads(arguments)
    assert isinstance(value, dict), arguments
    if not is_json:
        return
    try:
        jsonschema.validate(value, dict(tool.parameters))
    except jsonschema.ValidationError as error:
        raise AssertionError(f"{name}: {arguments}: {error.message}") from error
    except (jsonschema.SchemaError, Unresolvable, RecursionError):
        # Its meaning is open.
        return


TARGET: Final = Target(run=run, mutate=json_mutation(*_WORDS), max_bytes=1 << 19)
