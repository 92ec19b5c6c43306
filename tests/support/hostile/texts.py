"""Half of a character, everywhere where a text may stand."""

import json
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from typing import Any, Final

from tests.support.hostile.apis import (
    CHAT,
    COMPLETIONS,
    CONVERSATIONS,
    MESSAGES,
    RESPONSES,
    SECRET,
    Attack,
    Attacks,
)

SURROGATE: Final = "\ud800"

_PARAMETERS: Final = {"type": "object", "properties": {"a": {"description": "a"}}}
_FUNCTION: Final = {"name": "f", "description": "a", "parameters": _PARAMETERS}
_SCHEMA: Final = {"name": "x", "schema": {"const": "a"}}
_GRAMMAR: Final = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
_USER: Final = {"role": "user", "content": SECRET}

_TEXT: Final = {"type": "text", "text": "a"}
_CALL: Final = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_USE: Final = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": "a"}}
_RESULT: Final = {"type": "tool_result", "tool_use_id": "a", "content": "a"}
_ITEM: Final = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
_REASONING: Final = {"type": "reasoning", "summary": []}

Fields = dict[str, Any]


def _assistant(*blocks: Fields) -> Fields:
    return {"role": "assistant", "content": list(blocks)}


# Fields of requests that are served; together they have every field that holds a text.
_SERVED: Final[dict[str, list[Fields]]] = {
    CHAT: [
        {
            "messages": [
                {"role": "user", "content": [_TEXT], "name": "a"},
                _assistant(_TEXT) | {"reasoning_content": "a", "tool_calls": [_CALL]},
                {"role": "tool", "content": SECRET, "tool_call_id": "a"},
            ]
        },
        {
            "tools": [{"type": "function", "function": _FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        },
        {"stop": "a", "bad_words": ["a"], "cache_salt": "a", "chat_template_kwargs": {"x": "a"}},
        {"priority": "high", "service_tier": "auto"},
        {"response_format": {"type": "json_schema", "json_schema": _SCHEMA}},
        {"structured_outputs": {"json": {"const": "a"}}},
        {"structured_outputs": {"json": '{"const": "a"}'}},
        {"structured_outputs": {"regex": "a"}},
        {"structured_outputs": {"choice": ["a"]}},
        {"structured_outputs": {"grammar": 'start: "a"'}},
    ],
    COMPLETIONS: [{"prompt": SECRET}, {"prompt": ["a"], "stop": ["a"]}],
    MESSAGES: [
        {"system": "a", "stop_sequences": ["a"]},
        {"messages": [_USER, _assistant(_TEXT, _USE), {"role": "user", "content": [_RESULT]}]},
        {
            "tools": [{"name": "f", "description": "a", "input_schema": _PARAMETERS}],
            "tool_choice": {"type": "tool", "name": "f"},
        },
        {"output_config": {"format": {"type": "json_schema", "schema": {"const": "a"}}}},
    ],
    RESPONSES: [
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                _REASONING | {"summary": [{"type": "summary_text", "text": "a"}]},
                _ITEM,
                {"type": "function_call_output", "call_id": "a", "output": "a"},
                {"type": "custom_tool_call", "call_id": "b", "name": "g", "input": "a"},
                {"type": "custom_tool_call_output", "call_id": "b", "output": "a"},
                {"type": "message"} | _USER,
            ],
            "instructions": "a",
            "metadata": {"k": "a"},
        },
        {
            "tools": [
                {"type": "function", **_FUNCTION},
                {"type": "custom", "name": "g", "description": "a", "format": _GRAMMAR},
                {"type": "namespace", "name": "n", "description": "a", "tools": []},
                {"type": "web_search", "filters": {"allowed_domains": ["a"]}},
            ],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "f"}],
            },
        },
        dict.fromkeys(("user", "prompt_cache_key", "safety_identifier", "stop"), "a"),
        {"include": ["message.output_text.logprobs"], "chat_template_kwargs": {"x": "a"}},
        {"service_tier": "auto", "text": {"format": {"type": "json_schema", **_SCHEMA}}},
        {
            "tools": [{"type": "function", **_FUNCTION}],
            "tool_choice": {"type": "function", "name": "f"},
        },
    ],
    CONVERSATIONS: [{"items": [_USER, _ITEM], "metadata": {"k": "a"}}],
}
_REST: Final[dict[str, Fields]] = {
    CHAT: {"messages": [_USER], "max_tokens": 1},
    COMPLETIONS: {"prompt": SECRET, "max_tokens": 1},
    MESSAGES: {"messages": [_USER], "max_tokens": 1},
    RESPONSES: {"input": SECRET, "max_output_tokens": 1},
    CONVERSATIONS: {},
}
# Fields that only a request has that is served no more, or by an earlier answer.
_MORE: Final[dict[str, list[Fields]]] = {
    **{path: [{"model": "a"}] for path in _SERVED},
    MESSAGES: [
        {"model": "a"},
        {"messages": [_assistant({"type": "thinking", "thinking": "a", "signature": "a"}), _USER]},
        {"messages": [_assistant({"type": "redacted_thinking", "data": "a"}), _USER]},
        {"messages": [{"role": "user", "content": [{"type": "tool_reference", "tool_name": "a"}]}]},
    ],
    RESPONSES: [
        {"model": "a", "previous_response_id": "a"},
        {"conversation": "conv_a"},
        {"conversation": {"id": "conv_a"}},
        {"input": [{"id": "a"}, _ITEM | {"namespace": "a"}]},
        {"input": [_USER | {"id": "a", "status": "a"}, _REASONING | {"encrypted_content": "a"}]},
        {"input": [_REASONING | {"content": [{"type": "reasoning_text", "text": "a"}]}]},
    ],
}
# Their keys are the client's own.
_MAPS: Final = ("parameters", "input_schema", "chat_template_kwargs", "metadata")


def served() -> Attacks:
    """Return the requests in which the texts stand, which are no attacks."""
    return {
        f"{path}: {number}": Attack(path, partial(_encoded, _REST[path] | fields))
        for path, requests in _SERVED.items()
        for number, fields in enumerate(requests)
    }


def surrogates() -> Attacks:
    """Return each request with half of a character in place of one of its texts or keys."""
    return {
        f"{path}: {place}": Attack(path, partial(_encoded, _REST[path] | changed))
        for path, requests in _SERVED.items()
        for number, fields in enumerate([*requests, *_MORE[path]])
        for place, changed in _with_surrogate(fields, str(number))
    }


def _encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def _with_surrogate(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield copies of a value, each with one text exchanged, and where that stands."""
    if isinstance(value, str):
        yield place, SURROGATE
        return
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(pairs) if isinstance(value, dict | list) else ():
        for where, changed in _with_surrogate(inner, f"{place}.{key}"):
            copy = deepcopy(value)
            copy[key] = changed
            yield where, copy
        if key in _MAPS:
            copy = deepcopy(value)
            copy[key][SURROGATE] = 1
            yield f"{place}.{key}: a key", copy
