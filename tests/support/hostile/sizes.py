"""Megabytes of everything that a request can have many of."""

from functools import partial
from typing import Any, Final

from tests.support.hostile.apis import (
    CHAT,
    COMPLETIONS,
    COUNT,
    MESSAGES,
    RENDER,
    RESPONSES,
    SECRET,
    Attack,
    Attacks,
    Body,
    asking,
    chat,
    complete,
    filled,
    items,
    message,
    to,
    tool,
)
from tests.support.hostile.forged import CUSTOM, USE, answered, call

_USER: Final = '{"role":"user","content":"a"},'
_CALL: Final = '{"id":"a","function":{"name":"f"}},'

_UNITS: Final = {
    "letters": "a",
    "words": f"{SECRET} ",
    "blanks": " ",
    "lines": "\\n",
    "faces": "\U0001f600",
    "NULs": "\\u0000",
    "quotes": '\\"',
    "special tokens": "<|im_start|>",
}
_MESSAGE: Final = '{"messages":[{"role":"user","content":"'

_SIZES: Final[dict[str, tuple[str, Body]]] = {
    **{
        f"a message of {name}": (CHAT, partial(filled, _MESSAGE, unit, '"}]}'))
        for name, unit in _UNITS.items()
    },
    **{
        f"a prompt of {name}": (COMPLETIONS, partial(filled, '{"prompt":"', unit, '"}'))
        for name, unit in _UNITS.items()
    },
    "a prompt to render": (
        RENDER,
        lambda: filled('{"messages":[{"role":"user","content":"', "a", '"}]}'),
    ),
    "a text to tokenize": ("/tokenize", lambda: filled('{"prompt":"', "a", '"}')),
    "tokens to write": ("/detokenize", lambda: filled('{"tokens":[', "1,", "1]}")),
    "a prompt of tokens": (COMPLETIONS, lambda: filled('{"prompt":[', "1,", "1]}")),
    "prompts of tokens": (
        COMPLETIONS,
        lambda: filled('{"prompt":[', "[" + "1," * 2000 + "1],", "[1]]}"),
    ),
    "prompts": (COMPLETIONS, lambda: filled('{"prompt":[', '"a",', '"a"]}')),
    "no prompts": (COMPLETIONS, lambda: filled('{"prompt":[', "[],", "[]]}")),
    "prompts of all kinds": (COMPLETIONS, lambda: complete(prompt=["a", [1], [[1]]])),
    "messages": (CHAT, lambda: filled('{"messages":[', _USER, '{"role":"user","content":"a"}]}')),
    "8193 messages": (CHAT, lambda: f'{{"messages":[{_USER * 8192}{_USER[:-1]}]}}'.encode()),
    "8192 messages": (CHAT, lambda: f'{{"messages":[{_USER * 8191}{_USER[:-1]}]}}'.encode()),
    "tool calls": (
        CHAT,
        lambda: filled(
            '{"messages":[{"role":"assistant","tool_calls":[', _CALL, _CALL[:-1] + "]}]}"
        ),
    ),
    "parts": (
        CHAT,
        lambda: filled(
            '{"messages":[{"role":"user","content":[', '{"type":"text","text":""},', "1]}]}"
        ),
    ),
    "kind of part": (CHAT, lambda: chat([{"type": "x" * 1_000_000}])),
    "role": (CHAT, lambda: chat(messages=[{"role": "x" * 1_000_000, "content": "a"}])),
    "model": (CHAT, lambda: chat(model="x" * 1_000_000)),
    "a stop string": (CHAT, lambda: filled('{"messages":[],"stop":"', "a", '"}')),
    "stop strings": (CHAT, lambda: filled('{"messages":[],"stop":[', '"a",', '"a"]}')),
    "bad words": (CHAT, lambda: filled('{"messages":[],"bad_words":[', '"a",', '"a"]}')),
    "stop tokens": (CHAT, lambda: filled('{"messages":[],"stop_token_ids":[', "1,", "1]}")),
    "allowed tokens": (CHAT, lambda: filled('{"messages":[],"allowed_token_ids":[', "1,", "1]}")),
    "biases": (CHAT, lambda: chat(logit_bias={str(i): 1 for i in range(250_000)})),
    "tools": (CHAT, lambda: chat(tools=[tool(name=f"f{i}") for i in range(50_000)])),
    "same tools": (CHAT, lambda: chat(tools=[tool()] * 2)),
    "a description": (CHAT, lambda: chat(tools=[tool(description="x" * 4_000_000)])),
    "parameters": (CHAT, lambda: chat(tools=[tool(parameters={"x": [1] * 1_000_000})])),
    "parameters of 128 tools": (
        CHAT,
        lambda: chat(tools=[tool(name=f"f{i}", parameters={"x": [1] * 8000}) for i in range(128)]),
    ),
    "kwargs": (CHAT, lambda: chat(chat_template_kwargs={f"k{i}": 1 for i in range(200_000)})),
    "a choice": (CHAT, lambda: chat(structured_outputs={"choice": ["x" * 1_000_000]})),
    "choices": (
        CHAT,
        lambda: chat(structured_outputs={"choice": [f"{'x' * 1000}{i}" for i in range(1024)]}),
    ),
    "a schema": (CHAT, lambda: chat(structured_outputs={"json": {"enum": [1] * 1_000_000}})),
    "a schema as text": (CHAT, lambda: chat(structured_outputs={"json": " " * 4_000_000 + "{}"})),
    "a regex": (CHAT, lambda: chat(structured_outputs={"regex": "a" * 4_000_000})),
    "a grammar": (CHAT, lambda: chat(structured_outputs={"grammar": "a" * 4_000_000})),
    "turns": (
        MESSAGES,
        lambda: filled('{"max_tokens":1,"messages":[', _USER, '{"role":"user","content":"a"}]}'),
    ),
    "8192 turns": (
        MESSAGES,
        lambda: (
            f'{{"max_tokens":1,"system":"{"a" * 3_000_000}",'
            f'"messages":[{_USER * 8191}{_USER[:-1]}]}}'
        ).encode(),
    ),
    "blocks": (
        MESSAGES,
        lambda: filled(
            '{"max_tokens":1,"messages":[{"role":"user","content":[',
            '{"type":"text","text":""},',
            "1]}]}",
        ),
    ),
    "16385 blocks": (
        MESSAGES,
        lambda: message(
            messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 3277}] * 5
        ),
    ),
    "blocks of many turns": (
        MESSAGES,
        lambda: filled(
            '{"max_tokens":1,"messages":[',
            '{"role":"user","content":[' + '{"type":"text","text":"a"},' * 99 + "1]},",
            "1]}",
        ),
    ),
    "a block": (
        MESSAGES,
        lambda: filled(
            '{"max_tokens":1,"messages":[{"role":"user","content":[{"type":"text","text":"',
            f"{SECRET} ",
            '"}]}]}',
        ),
    ),
    "a text to count": (
        COUNT,
        lambda: filled('{"messages":[{"role":"user","content":"', "a", '"}]}'),
    ),
    "a kind of block": (MESSAGES, lambda: message([{"type": "x" * 1_000_000}])),
    "an input": (MESSAGES, answered(USE | {"input": {"x": [1] * 1_000_000}})),
    "stop sequences": (MESSAGES, lambda: message(stop_sequences=["a"] * 100_000)),
    "tools of messages": (
        MESSAGES,
        lambda: message(tools=[CUSTOM | {"name": f"f{i}"} for i in range(50_000)]),
    ),
    "tools of servers": (MESSAGES, lambda: message(tools=[{"type": "bash"}] * 60_000)),
    "a schema of messages": (
        MESSAGES,
        lambda: message(
            output_config={"format": {"type": "json_schema", "schema": {"enum": [1] * 1_000_000}}}
        ),
    ),
}


def _function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": "f"} | fields


_OUTPUT: Final = '{"type":"function_call_output","call_id":"a","output":"a"},'

_OF_RESPONSES: Final[dict[str, Body]] = {
    "an input": lambda: filled('{"input":"', "a", '"}'),
    "instructions": lambda: filled('{"input":"a","instructions":"', "a", '"}'),
    "items": lambda: filled('{"input":[', _USER, _USER[:-1] + "]}"),
    "8193 items": lambda: f'{{"input":[{_USER * 8192}{_USER[:-1]}]}}'.encode(),
    "8192 items": lambda: f'{{"input":[{_USER * 8191}{_USER[:-1]}]}}'.encode(),
    "outputs": lambda: filled('{"input":[', _OUTPUT, _OUTPUT[:-1] + "]}"),
    "parts": lambda: filled(
        '{"input":[{"role":"user","content":[', '{"type":"input_text","text":""},', "1]}]}"
    ),
    "sealed reasoning": lambda: filled(
        '{"input":[{"type":"reasoning","summary":[],"encrypted_content":"', "QUJD", '"}]}'
    ),
    "kind of item": items({"type": "x" * 1_000_000}),
    "an id": items({"id": "x" * 1_000_000}),
    "a call": items(call(name="x" * 1_000_000)),
    "tools": asking(tools=[_function(name=f"f{i}") for i in range(50_000)]),
    "hosted tools": asking(tools=[{"type": "mcp"}] * 50_000),
    "tools of a namespace": asking(
        tools=[
            {
                "type": "namespace",
                "name": "n",
                "tools": [_function(name=f"f{i}") for i in range(20_000)],
            }
        ]
    ),
    "namespaces": asking(
        tools=[
            {
                "type": "namespace",
                "name": f"n{i}",
                "tools": [_function(name="f"), _function(name="g")],
            }
            for i in range(512)
        ]
    ),
    "a hosted tool": asking(tools=[{"type": "mcp", "x": "a" * 4_000_000}]),
    "a grammar": asking(
        tools=[
            {
                "type": "custom",
                "name": "f",
                "format": {"type": "grammar", "definition": "a" * 4_000_000},
            }
        ]
    ),
    "a choice": asking(tool_choice={"type": "function", "name": "x" * 1_000_000}),
    "choices": asking(
        tools=[_function()],
        tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [_function()] * 50_000},
    ),
    "metadata": asking(metadata={f"k{i}": "v" for i in range(100_000)}),
    "include": asking(include=["reasoning.encrypted_content"] * 100_000),
    "previous_response_id": asking(previous_response_id="x" * 1_000_000),
    "tokens": asking(max_output_tokens=2**31 - 1),
    "a schema": asking(
        text={"format": {"type": "json_schema", "name": "x", "schema": {"enum": [1] * 1_000_000}}}
    ),
}


def sizes() -> Attacks:
    return {name: Attack(*each) for name, each in _SIZES.items()} | to(RESPONSES, _OF_RESPONSES)
