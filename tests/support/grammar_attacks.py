"""`python -m tests.support.grammar_attacks NAME ...`: chats with tools that would take minutes, over an app of its own.

The model writes its calls in tags, and calls the tool of each chat with many parameters.  A line for each answer has
its status; what takes more seconds of a core than allowed ends the process.
"""

import asyncio
import resource
import sys
from collections.abc import Callable
from functools import partial
from time import process_time
from typing import Any, Final

from mlx_lm.tool_parsers import qwen3_coder

from tests.support.marker_tokenizer import PLAIN_TEMPLATE, MarkerTokenizer
from tests.support.speaker import Served, served

SECONDS: Final = 5
_NUM_CALLED: Final = 60
_DEFINITION: Final = 64 * 1024
_REPEATED: Final = ("!", "?", "_", "!?_", '"', "/", "| ", "(", "a:\n")

Fields = dict[str, Any]


def _lark(definition: str) -> Fields:
    grammar = {"syntax": "lark", "definition": definition[:_DEFINITION]}
    custom = {"name": "f", "format": {"type": "grammar", "grammar": grammar}}
    return {"tools": [{"type": "custom", "custom": custom}], "max_tokens": 1}


def _tool(properties: Fields, **others: Any) -> Fields:
    parameters = {"type": "object", "properties": properties, **others}
    return {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
        "tool_choice": "required",
        "max_tokens": 1,
    }


def _read(properties: Fields, **others: Any) -> Fields:
    """Return a tool whose calls are read and follow no grammar."""
    return {"tools": _tool(properties, **others)["tools"]}


def _shared_definition(tool: Callable[..., Fields]) -> Fields:
    """Thousands of parameters that are one definition of many alternatives and keywords."""
    keywords = {f"x{index}": 1 for index in range(10_000)}
    definition = {"anyOf": [{"type": "string"}] * 500, **keywords}
    properties = {f"p{index}": {"$ref": "#/$defs/a"} for index in range(5000)}
    return tool(properties, **{"$defs": {"a": definition}})


def _required() -> Fields:
    names = [f"r{index}" for index in range(20_000)]
    return _tool({f"p{index}": {} for index in range(20_000)}, required=names)


def _nested() -> Fields:
    """Neither its rules nor their groups are too deep, but these in each other."""
    rules = [f"a{i}: {'(' * 24}a{i + 1}{')' * 24}\n" for i in range(24)]
    return _lark(f"{''.join(rules)}a24: /x/\nstart: a0")


LARK: Final[dict[str, Callable[[], Fields]]] = {
    **{
        f"{before}{text}": partial(_lark, before + text * _DEFINITION)
        for before in ("", "start: ")
        for text in _REPEATED
    },
    "nested": _nested,
}
SCHEMAS: Final[dict[str, Callable[[], Fields]]] = {
    "a shared definition": lambda: _shared_definition(_tool),
    "reading its values": lambda: _shared_definition(_read),
    "required names": _required,
    "reading beside a long name": lambda: _read({"n" * 20_000: {}}),
    "markers": lambda: _tool({"p": {"enum": ["</parameter>" * 20_000]}}),
}


def _model() -> MarkerTokenizer:
    tokenizer = MarkerTokenizer(
        plain=("<tool_call>", "</tool_call>", "</parameter>"),
        template=f"{{# tools #}}{PLAIN_TEMPLATE}",
    )
    tokenizer.tool_parser = qwen3_coder.parse_tool_call
    tokenizer.tool_call_start = qwen3_coder.tool_call_start
    tokenizer.tool_call_end = qwen3_coder.tool_call_end
    return tokenizer


def _call() -> str:
    values = "".join(f"<parameter=p{index}>\nx\n</parameter>\n" for index in range(_NUM_CALLED))
    return f"<tool_call>\n<function=f>\n{values}</function>\n</tool_call>"


async def _attack(server: Served, name: str) -> None:
    fields = (LARK | SCHEMAS)[name]()
    seconds = int(process_time()) + 1 + SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
    response = await server.chat(**fields)
    sys.stdout.write(f"{response.status_code}\n")
    sys.stdout.flush()


async def _attack_all(names: list[str]) -> None:
    tokenizer = _model()
    said = tokenizer.encode(_call())
    async with served(said, tokenizer=tokenizer, num_blocks=1024) as server:
        for name in names:
            await _attack(server, name)


if __name__ == "__main__":
    asyncio.run(_attack_all(sys.argv[1:]))
