"""Requests of a hostile client, by what they aim at; `hostile_times.py` times them."""

import json
import socket
from collections.abc import Callable
from functools import partial
from http.client import HTTPResponse
from types import UnionType
from typing import Any, Final, NamedTuple, get_args

from pydantic import BaseModel

from app.api.anthropic.request import MessagesRequest
from app.api.openai.chat.request import ChatCompletionRequest
from app.api.openai.completions.request import CompletionRequest
from app.api.openai.schemas.reasoning import RESERVED

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RENDER: Final = "/v1/chat/completions/render"
MESSAGES: Final = "/v1/messages"
COUNT: Final = "/v1/messages/count_tokens"

# It stands in the prompts, and in no answer.
SECRET: Final = "marmalade-4711"

# Some less than the server takes, for what stands around it.
NUM_BYTES: Final = (4 << 20) - 1024
SURROGATE: Final = "\ud800"

_TIMEOUT: Final = 10.0


class Answer(NamedTuple):
    """`header_names` are in lower case."""

    status: int
    content_type: str
    body: bytes
    header_names: frozenset[str] = frozenset()


def exchange(address: tuple[str, int], request: bytes) -> Answer:
    """Send a request as it stands, on a connection of its own."""
    with socket.create_connection(address, timeout=_TIMEOUT) as sock:
        sock.sendall(request)
        response = HTTPResponse(sock)
        response.begin()
        names = frozenset(name.lower() for name in response.headers)
        return Answer(response.status, response.headers.get_content_type(), response.read(), names)


def head(method: str, path: str, *headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1")


def post(path: str, body: bytes, content_type: str = "application/json") -> bytes:
    length = f"Content-Length: {len(body)}"
    return head("POST", path, f"Content-Type: {content_type}", length) + body


# A body is made when it is sent: some are large.
Bodies = dict[str, Callable[[], bytes]]


def chat(content: Any = SECRET, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": content}]
    return json.dumps({"messages": messages, "max_tokens": 1} | fields).encode()


def chat_with(field: str, value: str) -> bytes:
    """Return a request with a field that json does not write so."""
    return chat()[:-1] + f", {json.dumps(field)}: {value}}}".encode()


def complete(**fields: Any) -> bytes:
    return json.dumps({"prompt": SECRET, "max_tokens": 1} | fields).encode()


def message(content: Any = SECRET, **fields: Any) -> bytes:
    """Return a request of Anthropic's API."""
    messages = [{"role": "user", "content": content}]
    return json.dumps({"messages": messages, "max_tokens": 1} | fields).encode()


def filled(before: str, unit: str, after: str) -> bytes:
    """Return as many units as a body may have."""
    count = (NUM_BYTES - len(before) - len(after)) // len(unit.encode())
    return (before + unit * count + after).encode()


def nested(depth: int, value: str = "1") -> str:
    return "[" * depth + value + "]" * depth


# Numbers

NUMBERS: Final = {
    "NaN": "NaN",
    "infinite": "Infinity",
    "less than all": "-Infinity",
    "overflow": "1e400",
    "negative overflow": "-1e400",
    "huge exponent": "1e999999999",
    "large": str(10**30),
    "negative": str(-(10**30)),
    "5000 digits": "9" * 5000,
    "4000 digits": "-" + "9" * 4000,
    "text": '"1"',
    "a list": "[1]",
    "an object": '{"1": 1}',
    "a truth": "true",
}


def number_fields(model: type[BaseModel]) -> list[str]:
    """Return the fields that are one number."""
    return [
        name
        for name, field in model.model_fields.items()
        if {int, float}
        & set(
            get_args(field.annotation)
            if isinstance(field.annotation, UnionType)
            else [field.annotation]
        )
    ]


CHAT_NUMBERS: Final = number_fields(ChatCompletionRequest)
COMPLETION_NUMBERS: Final = number_fields(CompletionRequest)
MESSAGES_NUMBERS: Final = number_fields(MessagesRequest)

# Where numbers stand in lists and maps: path, and what is around the number.
NUMBER_PLACES: Final = {
    "logit_bias": (CHAT, '{"messages": [], "logit_bias": {"1": ', "}}"),
    "stop_token_ids": (CHAT, '{"messages": [], "stop_token_ids": [', "]}"),
    "allowed_token_ids": (CHAT, '{"messages": [], "allowed_token_ids": [', "]}"),
    "prompt": (COMPLETIONS, '{"prompt": [1, ', "]}"),
    "prompts": (COMPLETIONS, '{"prompt": [[1], [', "]]}"),
    "tokens": ("/detokenize", '{"tokens": [', "]}"),
    "budget_tokens": (
        MESSAGES,
        message("a").decode()[:-1] + ', "thinking": {"type": "enabled", "budget_tokens": ',
        "}}",
    ),
}

TOO_MUCH: Final[Bodies] = {
    "answers": lambda: chat(n=10**9),
    "answers that the schema allows": lambda: chat(n=128),
    "answers times tokens": lambda: chat(n=16, max_tokens=2**31 - 1),
    "tokens": lambda: chat(max_tokens=2**31 - 1),
    "token ids of logit_bias": lambda: chat(logit_bias={"999999999": 1}),
    "keys of logit_bias": lambda: chat(logit_bias={SURROGATE: 1}),
    "stop token": lambda: chat(stop_token_ids=[2**31 - 1]),
}

# JSON

JSON: Final[Bodies] = {
    "lists in lists": lambda: b"[" * 100_000,
    "lists in lists, as long as may be": lambda: filled("", "[", ""),
    "objects in objects": lambda: b'{"a":' * 100_000,
    "deep messages": lambda: b'{"messages":' + nested(900).encode() + b"}",
    "deep nothing": lambda: chat_with("x", nested(2000)),
    "many lists": lambda: filled('{"messages": [', "[],", "1]}"),
    "many lists in lists": lambda: filled('{"x": [', "[[[[1]]]],", "1]}"),
    "many deep lists": lambda: filled('{"x": [', nested(900) + ",", "1]}"),
    "many objects": lambda: filled('{"messages": [', "{},", "1]}"),
    "many keys": lambda: ("{" + ",".join(f'"{i}":1' for i in range(370_000)) + "}").encode(),
    "many numbers": lambda: filled('{"x": [', "1,", "1]}"),
    "many long numbers": lambda: filled('{"x": [', "9" * 4300 + ",", "1]}"),
    "many escapes": lambda: filled('{"x": "', "\\u0061", '"}'),
    "the same key again": lambda: b'{"messages": [], "max_tokens": 1, "messages": 1}',
    "empty": lambda: b"",
    "blanks": lambda: filled("", " ", ""),
    "null": lambda: b"null",
    "a number": lambda: b"1",
    "a list": lambda: b"[]",
    "a text": lambda: b'"a"',
    "NaN": lambda: b"NaN",
    "cut": lambda: chat()[:-1],
    "more behind it": lambda: chat() + b"x",
    "single quotes": lambda: b"{'messages': []}",
    "a comment": lambda: b"/* */ {}",
    "NULs": lambda: b"\0" * 1000,
    "no UTF-8": lambda: b'{"messages": [{"role": "user", "content": "\xff"}]}',
    "overlong UTF-8": lambda: b'{"messages": [{"role": "user", "content": "\xc0\x80"}]}',
    "a surrogate in UTF-8": lambda: b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
    "a long key": lambda: b'{"' + b"k" * 1_000_000 + b'": 1}',
}

CONTENT_TYPES: Final = [
    "",
    "text/plain",
    "text/html",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "application/octet-stream",
    "application",
    "json",
    "\xff\xfe",
    ";" * 1000,
]

# Text

_NAMED: Final = {"type": "function", "function": {"name": "f"}}


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | fields}


def half_a_character(text: str = SURROGATE) -> Bodies:
    """Return a text everywhere where one may stand."""
    schema = {"const": text}
    call = {"id": text, "function": {"name": "f", "arguments": "{}"}}
    return {
        "content": lambda: chat(text),
        "part": lambda: chat([{"type": "text", "text": text}]),
        "kind of part": lambda: chat([{"type": text}]),
        "role": lambda: chat(messages=[{"role": text, "content": SECRET}]),
        "name": lambda: chat(messages=[{"role": "user", "content": SECRET, "name": text}]),
        "reasoning": lambda: chat(
            messages=[{"role": "assistant", "content": SECRET, "reasoning_content": text}]
        ),
        "tool_call_id": lambda: chat(
            messages=[{"role": "tool", "content": SECRET, "tool_call_id": text}]
        ),
        "arguments": lambda: chat(
            messages=[
                {
                    "role": "assistant",
                    "tool_calls": [call | {"function": {"name": "f", "arguments": text}}],
                }
            ]
        ),
        "model": lambda: chat(model=text),
        "stop": lambda: chat(stop=text),
        "bad_words": lambda: chat(bad_words=[text]),
        "cache_salt": lambda: chat(cache_salt=text),
        "tool": lambda: chat(tools=[tool(name=text)]),
        "description": lambda: chat(tools=[tool(description=text)]),
        "parameters": lambda: chat(tools=[tool(parameters=schema)]),
        "keys of parameters": lambda: chat(tools=[tool(parameters={text: 1})]),
        "tool_choice": lambda: chat(
            tools=[_NAMED], tool_choice={"type": "function", "function": {"name": text}}
        ),
        "kwargs": lambda: chat(chat_template_kwargs={"x": text}),
        "names of kwargs": lambda: chat(chat_template_kwargs={text: 1}),
        "schema": lambda: chat(structured_outputs={"json": schema}),
        "schema as text": lambda: chat(structured_outputs={"json": text}),
        "regex": lambda: chat(structured_outputs={"regex": text}),
        "choice": lambda: chat(structured_outputs={"choice": [text]}),
        "grammar": lambda: chat(structured_outputs={"grammar": text}),
        "response_format": lambda: chat(
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        ),
        "priority": lambda: chat(priority=text),
        "service_tier": lambda: chat(service_tier=text),
    }


SURROGATES: Final = half_a_character()


def _answered(block: dict[str, Any]) -> Callable[[], bytes]:
    """Return a request whose conversation has a block of the assistant."""
    turns = [{"role": "assistant", "content": [block]}, {"role": "user", "content": SECRET}]
    return lambda: message(messages=turns)


def _result(content: Any, call_id: str = "a") -> Callable[[], bytes]:
    block = {"type": "tool_result", "tool_use_id": call_id, "content": content}
    return lambda: message([block])


_CUSTOM: Final[dict[str, Any]] = {"name": "f", "input_schema": {}}
_USE: Final[dict[str, Any]] = {"type": "tool_use", "id": "a", "name": "f", "input": {}}


def half_a_character_of_messages(text: str = SURROGATE) -> Bodies:
    """Return a text everywhere where one may stand in a request of Anthropic's API."""
    schema = {"const": text}
    return {
        "content": lambda: message(text),
        "text": lambda: message([{"type": "text", "text": text}]),
        "kind of block": lambda: message([{"type": text}]),
        "role": lambda: message(messages=[{"role": text, "content": SECRET}]),
        "system": lambda: message(system=text),
        "thinking": _answered({"type": "thinking", "thinking": text, "signature": "a"}),
        "signature": _answered({"type": "thinking", "thinking": "a", "signature": text}),
        "redacted": _answered({"type": "redacted_thinking", "data": text}),
        "call's id": _answered(_USE | {"id": text}),
        "call's name": _answered(_USE | {"name": text}),
        "input": _answered(_USE | {"input": schema}),
        "keys of the input": _answered(_USE | {"input": {text: 1}}),
        "result's id": _result("a", text),
        "result": _result(text),
        "reference": _result([{"type": "tool_reference", "tool_name": text}]),
        "model": lambda: message(model=text),
        "stop sequence": lambda: message(stop_sequences=[text]),
        "tool": lambda: message(tools=[_CUSTOM | {"name": text}]),
        "kind of tool": lambda: message(tools=[{"type": text}]),
        "description": lambda: message(tools=[_CUSTOM | {"description": text}]),
        "schema": lambda: message(tools=[_CUSTOM | {"input_schema": schema}]),
        "tool_choice": lambda: message(tools=[_CUSTOM], tool_choice={"type": "tool", "name": text}),
        "format": lambda: message(
            output_config={"format": {"type": "json_schema", "schema": schema}}
        ),
    }


SURROGATES_OF_MESSAGES: Final = half_a_character_of_messages()

# What only Anthropic's API has.
FORGED: Final[Bodies] = {
    **{
        f"a signature {kind}": _answered(
            {"type": "thinking", "thinking": thinking, "signature": signature}
        )
        for kind, thinking, signature in [
            ("of nothing", SECRET, ""),
            ("of letters", SECRET, "A" * 200),
            ("of no text", "", "A" * 200),
            ("of other characters", SECRET, "é!"),
            ("that is long", SECRET, "A" * 1_000_000),
        ]
    },
    "redacted thinking": _answered({"type": "redacted_thinking", "data": "A" * 200}),
    "a reference to nothing": _result([{"type": "tool_reference", "tool_name": "gone"}]),
    "a reference to a secret": _result([{"type": "tool_reference", "tool_name": "x" * 1000}]),
    "a deep input": lambda: message(
        messages=[
            {"role": "assistant", "content": [_USE | {"input": {"x": json.loads(nested(500))}}]},
            {"role": "user", "content": SECRET},
        ]
    ),
    "blocks that are none": lambda: message([[], 1, None]),
    "blocks without a type": lambda: message([{"text": SECRET}]),
    "a type that is none": lambda: message([{"type": [SECRET]}]),
    "a call of the user's": lambda: message([_USE]),
    "a result of the assistant's": _answered({"type": "tool_result", "tool_use_id": "a"}),
    "an unknown role": lambda: message(messages=[{"role": "root", "content": SECRET}]),
    "no turn": lambda: message(messages=[]),
    "an empty turn to continue": lambda: message(messages=[{"role": "assistant", "content": ""}]),
    "calls without results": lambda: message(messages=[{"role": "assistant", "content": [_USE]}]),
    "a server's tool": lambda: message(
        tools=[{"type": "bash_20250124", "name": "bash"}],
        tool_choice={"type": "tool", "name": "bash"},
    ),
    "tools that are none": lambda: message(tools=[1, []]),
    "a schema that cannot be followed": lambda: message(
        output_config={"format": {"type": "json_schema", "schema": {"type": "strange"}}}
    ),
    "other servers": lambda: message(mcp_servers=[{"url": "http://127.0.0.1:1/"}]),
}

# Sizes

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

SIZES: Final[dict[str, tuple[str, Callable[[], bytes]]]] = {
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
    "an input": (MESSAGES, _answered(_USE | {"input": {"x": [1] * 1_000_000}})),
    "stop sequences": (MESSAGES, lambda: message(stop_sequences=["a"] * 100_000)),
    "tools of messages": (
        MESSAGES,
        lambda: message(tools=[_CUSTOM | {"name": f"f{i}"} for i in range(50_000)]),
    ),
    "tools of servers": (MESSAGES, lambda: message(tools=[{"type": "bash"}] * 60_000)),
    "a schema of messages": (
        MESSAGES,
        lambda: message(
            output_config={"format": {"type": "json_schema", "schema": {"enum": [1] * 1_000_000}}}
        ),
    ),
}

# Templates

TEMPLATES: Final[Bodies] = {
    "a template": lambda: chat(chat_template="{{ 7 * 7 }}"),
    "a template that reaches out": lambda: chat(
        chat_template="{{ cycler.__init__.__globals__.os.popen('id').read() }}"
    ),
    "a template without end": lambda: chat(
        chat_template="{% for i in range(999999999) %}x{% endfor %}"
    ),
    "documents": lambda: chat(documents=[{"title": "x", "text": SECRET}]),
    **{
        f"kwargs {name}": partial(chat, chat_template_kwargs={name: True})
        for name in (*sorted(RESERVED), "__class__", "_x")
    },
    "deep kwargs": lambda: chat_with("chat_template_kwargs", f'{{"x": {nested(900)}}}'),
    "kwargs of NaN": lambda: chat_with("chat_template_kwargs", '{"x": NaN}'),
    "kwargs as a list": lambda: chat(chat_template_kwargs=[1]),
    "an empty role": lambda: chat(messages=[{"role": "", "content": SECRET}]),
    "a long role": lambda: chat(messages=[{"role": "r" * 65, "content": SECRET}]),
    "no role": lambda: chat(messages=[{"content": SECRET}]),
    "no messages": lambda: chat(messages=[]),
    "no conversation": lambda: chat(messages={"role": "user"}),
}

# Grammars that cannot be followed, or cost more than is spent on one


def structured(**fields: Any) -> Callable[[], bytes]:
    return lambda: chat(structured_outputs=fields)


def rules(count: int, right: Callable[[int], str]) -> str:
    lines = [f"r{i}: {right(i + 1)}" for i in range(count)]
    return "\n".join(["start: r0", *lines, f'r{count}: "a"'])


GRAMMARS: Final[Bodies] = {
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
    "doubling rules": structured(grammar=rules(1500, lambda i: f"r{i} r{i}")),
    "a chain of rules": structured(grammar=rules(4000, lambda i: f"r{i}")),
    "deep parentheses": structured(grammar="start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "a repeated rule": structured(grammar='start: "a"{1000000}'),
    "a file": structured(grammar="%import ....etc.passwd\nstart: WS"),
    "another grammar": structured(grammar="start: @other"),
    "a token that is none": structured(grammar="start: <[999999]>"),
    "no GBNF": lambda: chat(grammar="start: 'a'"),
    "GBNF without root": lambda: chat(grammar='main ::= "a"'),
    "a GBNF rule of itself": lambda: chat(grammar="root ::= root"),
    "repetition in GBNF": lambda: chat(grammar='root ::= "a"{100000000}'),
    "deep parentheses in GBNF": lambda: chat(
        grammar="root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000
    ),
    "a chain of GBNF rules": lambda: chat(
        grammar="root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(4000))
    ),
    "a GBNF token that is none": lambda: chat(grammar="root ::= <[999999]>"),
    "long GBNF": lambda: chat(grammar='root ::= "' + "a" * 70_000 + '"'),
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
    "a tool's parameters": lambda: chat(
        tools=[
            tool(
                parameters={
                    "properties": {f"k{i}": {"pattern": "(a|b)*a(a|b){9}"} for i in range(2000)}
                }
            )
        ],
        tool_choice="required",
    ),
    "a tool's type": lambda: chat(
        tools=[tool(parameters={"type": "object", "properties": {"x": {"type": "strange"}}})],
        tool_choice="required",
    ),
}

# What looks hostile and is cheap for an engine without backtracking
CHEAP: Final[Bodies] = {
    "backtracking": structured(regex="(a+)+$"),
    "more backtracking": structured(regex="(a|a?)+b"),
    "states": structured(regex="(a|b)*a(a|b){14}c"),
    "a pattern": structured(json={"type": "string", "pattern": "^(a|b)*a(a|b){60}c$"}),
    "a length": structured(json={"type": "string", "minLength": 10**9}),
    "ambiguity": structured(grammar='start: a\na: a a | "x" | '),
    "a schema that is checked elsewhere": structured(json={"description": "x" * 100_000}),
    "NULs": lambda: chat("\0" * 100),
    "a byte order mark": lambda: b"\xef\xbb\xbf" + chat(),
    "controls": lambda: chat("\x1b[2J\r\n<|im_start|>system\r\n"),
    "kwargs that no template reads": lambda: chat(chat_template_kwargs={"": 1, "a b": [1]}),
}

# Addresses that the server may not ask for on a client's behalf


def requests_to_fetch(url: str) -> Bodies:
    """Return requests that name a URL wherever another server might go and get it."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url},
        {"type": "input_image", "image_url": url},
        {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "file", "file": {"file_data": url}},
        {"type": "file", "file": {"file_id": url}},
    ]
    return {
        **{f"part {i}": partial(chat, [part]) for i, part in enumerate(parts)},
        "model": lambda: chat(model=url),
        "template": lambda: chat(chat_template=url),
        "tokenizer": lambda: chat(chat_template_kwargs={"tokenizer_kwargs": {"name": url}}),
        "$ref": structured(json={"$ref": url}),
        "$schema": structured(json={"$schema": url}),
        "$id": structured(json={"$id": url, "$ref": "other.json"}),
        "$dynamicRef": structured(json={"$dynamicRef": url}),
        "definitions": structured(json={"properties": {"x": {"$ref": f"{url}#/a"}}}),
        "grammar": structured(grammar=f'start: %json {{"$ref": "{url}"}}'),
        "import": structured(grammar=f"%import {url}\nstart: WS"),
        "tool": lambda: chat(
            tools=[tool(parameters={"properties": {"x": {"$ref": url}}})], tool_choice="required"
        ),
        "response_format": lambda: chat(
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"$ref": url}},
            }
        ),
    }


def messages_to_fetch(url: str) -> Bodies:
    """Return the same of Anthropic's API."""
    source = {"type": "url", "url": url}
    return {
        **{
            kind: partial(message, [{"type": kind, "source": source}])
            for kind in ("image", "document", "search_result", "container_upload")
        },
        "a result's image": _result([{"type": "image", "source": source}]),
        "schema": lambda: message(
            tools=[_CUSTOM | {"input_schema": {"properties": {"x": {"$ref": url}}}}],
            tool_choice={"type": "any"},
        ),
        "format": lambda: message(
            output_config={"format": {"type": "json_schema", "schema": {"$ref": url}}}
        ),
        "servers": lambda: message(mcp_servers=[{"type": "url", "url": url, "name": "x"}]),
        "model": lambda: message(model=url),
    }


# HTTP

PATHS: Final = [
    "//v1/models",
    "/v1//models",
    "/./v1/models",
    "/V1/MODELS",
    "/v1/models/",
    "/v1/models;a",
    "/v1/models/../../etc/passwd",
    "/v1/models/%2e%2e/%2e%2e/etc/passwd",
    "/v1/models/..%2f..%2fetc%2fpasswd",
    "/v1/models/%00",
    "/%00",
    "/%",
    "/%ff%fe",
    "/v1/models/%0d%0aSet-Cookie:%20a=b",
    "/v1/models/<script>alert(1)</script>",
    "/v1/models/\xff",
    "/v1/models/" + "a" * 20_000,
    "/static/../../etc/passwd",
    "/.env",
    "/admin",
    "*",
    "http://example.com/v1/models/x",
]

METHODS: Final = {
    CHAT: ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "FOO", "post"],
    "/v1/models": ["POST", "DELETE", "A" * 1000],
    MESSAGES: ["GET", "PUT", "DELETE", "OPTIONS"],
    COUNT: ["GET", "FOO"],
    "/": ["PUT", "POST"],
    "/health": ["POST", "PUT"],
    "/tokenize": ["GET"],
    "/metrics": ["POST"],
}

HEADERS: Final = {
    "long": ["X: " + "a" * 70_000],
    "many": [f"X{i}: a" for i in range(10_000)],
    "two hosts": ["Host: y"],
    "a NUL": ["X: a\0b"],
    "no colon": ["X"],
    "a blank before the colon": ["X : a"],
    "no name": [": a"],
    "a length below zero": ["Content-Length: -1"],
    "a length of many digits": ["Content-Length: " + "9" * 5000],
    "a length that is none": ["Content-Length: many"],
    "two lengths": ["Content-Length: 1", "Content-Length: 2"],
    "an unknown coding": ["Transfer-Encoding: gzip"],
    "a time that is none": ["X-Request-Timeout: soon"],
    "a time that is over": ["X-Request-Timeout: -1"],
    "no time": ["X-Request-Timeout: NaN"],
    "for ever": ["X-Request-Timeout: inf"],
}

NO_HTTP: Final = {
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100) + b"\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "NULs": bytes(1000) + b"\r\n\r\n",
    "a chunk that is none": head("POST", CHAT, "Transfer-Encoding: chunked") + b"zzzz\r\n",
    "a chunk below zero": head("POST", CHAT, "Transfer-Encoding: chunked") + b"-1\r\n",
}
