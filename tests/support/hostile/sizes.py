"""Megabytes of everything that a request can have many of."""

from functools import partial
from typing import Final

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
    chatting,
    filled,
    message,
    tool,
)

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
_IN_CHAT: Final = '{"max_tokens":1,"messages":[{"role":"user","content":"', '"}]}'
# What is around a text that becomes a prompt.
_PROMPTS: Final = {
    CHAT: _IN_CHAT,
    RENDER: _IN_CHAT,
    COMPLETIONS: ('{"prompt":"', '"}'),
    MESSAGES: _IN_CHAT,
    COUNT: _IN_CHAT,
    RESPONSES: ('{"input":"', '"}'),
    "/tokenize": ('{"prompt":"', '"}'),
}
_USER: Final = '{"role":"user","content":"a"},'
_OUTPUT: Final = '{"type":"function_call_output","call_id":"a","output":"a"},'
_CALL: Final = '{"id":"a","function":{"name":"f"}},'
_BLOCK: Final = '{"type":"text","text":""},'
_TURNS: Final = '{"max_tokens":1,"messages":['


def _list(before: str, unit: str, after: str) -> Body:
    """Return as many units as a body may have; the last one without its comma."""
    return partial(filled, before, unit, unit[:-1] + after)


# Many of what is right by itself.
_MANY: Final[list[tuple[str, Body]]] = [
    (COMPLETIONS, _list('{"prompt":[', "1,", "]}")),
    (COMPLETIONS, _list('{"prompt":[', '"a",', "]}")),
    (COMPLETIONS, _list('{"prompt":[', "[],", "]}")),
    (COMPLETIONS, _list('{"prompt":[', f"[{'1,' * 2000}1],", "]}")),
    ("/detokenize", _list('{"tokens":[', "1,", "]}")),
    *((path, _list(_TURNS, _USER, "]}")) for path in (CHAT, MESSAGES)),
    *((CHAT, lambda n=n: f"{_TURNS}{_USER * n}{_USER[:-1]}]}}".encode()) for n in (8191, 8192)),
    (CHAT, _list(f'{_TURNS}{{"role":"assistant","tool_calls":[', _CALL, "]}]}")),
    *(
        (path, _list(f'{_TURNS}{{"role":"user","content":[', _BLOCK, "]}]}"))
        for path in (CHAT, MESSAGES)
    ),
    (MESSAGES, _list(_TURNS, f'{{"role":"user","content":[{_BLOCK * 99}1]}},', "]}")),
    (RESPONSES, _list('{"input":[', _USER, "]}")),
    (RESPONSES, _list('{"input":[', _OUTPUT, "]}")),
    (CHAT, chatting(tools=[tool(name=f"f{i}") for i in range(50_000)])),
    (
        CHAT,
        chatting(tools=[tool(name=f"f{i}", parameters={"x": [1] * 8000}) for i in range(128)]),
    ),
    (CHAT, chatting(structured_outputs={"choice": [f"{'x' * 1000}{i}" for i in range(1024)]})),
    (
        MESSAGES,
        lambda: message(tools=[{"name": f"f{i}", "input_schema": {}} for i in range(50_000)]),
    ),
    (
        RESPONSES,
        asking(
            tools=[
                {
                    "type": "namespace",
                    "name": f"n{i}",
                    "tools": [{"type": "function", "name": name} for name in "fg"],
                }
                for i in range(512)
            ]
        ),
    ),
]


def sizes() -> Attacks:
    texts = {
        f"{path}: {name}": Attack(path, partial(filled, before, unit, after))
        for path, (before, after) in _PROMPTS.items()
        for name, unit in _UNITS.items()
    }
    many = {f"{path}: many {i}": Attack(path, body) for i, (path, body) in enumerate(_MANY)}
    return texts | many
