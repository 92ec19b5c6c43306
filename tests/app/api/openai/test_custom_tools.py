"""Custom tools of a chat: their input is text, whole and streamed."""

import json
from typing import Any, Final

import pytest
from openai.types.chat import ChatCompletion

from app.api.openai.chat.call_writer import CallWriter
from app.api.openai.chat.response import ResponseCustomCall
from app.parsing.events import ToolCallArguments, ToolCallStart
from tests.support.byte_tokenizers import Bytes
from tests.support.chunks import chunks
from tests.support.rows import rows
from tests.support.sdk_types import check_shape
from tests.support.speaker import MODEL_ID, Served, served

pytestmark = pytest.mark.anyio

PATCH: Final[dict[str, Any]] = {"type": "custom", "custom": {"name": "patch"}}
ADD: Final[dict[str, Any]] = {"type": "function", "function": {"name": "add"}}
REGEX: Final[dict[str, Any]] = {
    "type": "custom",
    "custom": {
        "name": "patch",
        "description": "Changes files.",
        "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[ab]+"}},
    },
}
TEXT: Final = '*** Begin\n"é" \\ 😊'


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def patch(text: str = TEXT) -> str:
    return call("patch", json.dumps({"input": text}, ensure_ascii=False))


async def whole(server: Served, **fields: Any) -> dict[str, Any]:
    """Return the one choice of a response, which has OpenAI's shape."""
    answer = await server.chat(**fields)
    assert answer.status_code == 200, answer.text
    check_shape(answer.json(), ChatCompletion)
    (choice,) = answer.json()["choices"]
    choice["message"].pop("refusal")
    return dict(choice)


async def streamed(server: Served, **fields: Any) -> list[dict[str, Any]]:
    """Return the pieces of calls in the order in which they come."""
    parts = chunks(await server.chat(stream=True, **fields))
    deltas = [choice["delta"] for part in parts for choice in part["choices"]]
    return [piece for delta in deltas for piece in delta.get("tool_calls", [])]


async def test_a_call_has_the_text_as_its_input() -> None:
    tools = [ADD, PATCH]
    said = f"Well. {call('add', '{}')}{patch()}"
    async with served(said.encode(), tokenizer=Bytes()) as server:
        choice = await whole(server, tools=tools)
        pieces = await streamed(server, tools=tools)
    added, patched = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert added.pop("id") != patched.pop("id")
    assert added == {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    assert patched == {"type": "custom", "custom": {"name": "patch", "input": TEXT}}
    first, *others = [piece for piece in pieces if piece["index"] == 1]
    assert first.pop("id").startswith("call_")
    assert first == {"index": 1, "type": "custom", "custom": {"name": "patch", "input": ""}}
    assert all(piece.keys() == {"index", "custom"} for piece in others)
    assert len(others) > 3
    assert "".join(piece["custom"]["input"] for piece in others) == TEXT
    functions = [piece["function"] for piece in pieces if piece["index"] == 0]
    assert "".join(function["arguments"] for function in functions) == "{}"


@pytest.mark.parametrize("arguments", ['{"a": 1, "input": "x"}', '{"input": "x"}'])
def test_a_text_that_comes_late_is_written_before_the_next_call(arguments: str) -> None:
    writer = CallWriter({"patch"})
    events: list[ToolCallStart | ToolCallArguments] = [
        ToolCallStart(0, "c0", "patch"),
        ToolCallArguments(0, arguments),
        ToolCallStart(1, "c1", "add"),
        ToolCallArguments(1, "{}"),
        ToolCallStart(2, "c2", "patch"),
        ToolCallArguments(2, arguments),
    ]
    pieces = [piece for event in events for piece in writer.write(5, event)] + writer.end(5)
    assert writer.end(5) == []
    texts = ["", "", ""]
    for piece in pieces:
        assert piece.index is not None
        if isinstance(piece, ResponseCustomCall):
            texts[piece.index] += piece.custom.input or ""
    assert texts == ["x", "", "x"]
    assert [piece.index for piece in pieces] == [0, 0, 1, 1, 2, 2]


@rows("length", range(10, 70, 6))
async def test_a_call_that_is_cut_has_the_text_that_has_come(length: int) -> None:
    async with served(patch("ab" * 20).encode(), tokenizer=Bytes()) as server:
        fields = {"tools": [PATCH], "tool_choice": "required", "max_tokens": length}
        choice = await whole(server, **fields)
        pieces = await streamed(server, **fields)
    made = choice["message"].get("tool_calls", [])
    text = "".join(each["custom"]["input"] for each in made)
    assert choice["finish_reason"] == "length"
    assert ("ab" * 20).startswith(text)
    assert (len(text) > 0) == (length > len(patch("")) - len('"}}\n</tool_call>'))
    assert "".join(piece["custom"]["input"] for piece in pieces) == text


async def test_each_choice_has_its_own_call() -> None:
    async with served(patch().encode(), tokenizer=Bytes()) as server:
        parts = chunks(await server.chat(stream=True, tools=[PATCH], n=2))
    texts = ["", ""]
    for choice in (choice for part in parts for choice in part["choices"]):
        for piece in choice["delta"].get("tool_calls", []):
            texts[choice["index"]] += piece["custom"]["input"]
    assert texts == [TEXT, TEXT]


async def test_a_choice_and_a_grammar_are_enforced() -> None:
    choices: list[Any] = [
        {"type": "custom", "custom": {"name": "patch"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [PATCH]}},
    ]
    async with served(patch("ab").encode(), tokenizer=Bytes()) as server:
        for tool_choice in choices:
            choice = await whole(server, tools=[ADD, REGEX], tool_choice=tool_choice)
            (made,) = choice["message"]["tool_calls"]
            assert made["custom"] == {"name": "patch", "input": "ab"}
            named = tool_choice["type"] == "custom"
            assert choice["finish_reason"] == ("stop" if named else "tool_calls")
    grammar = {"syntax": "lark", "definition": 'start: "a" start?'}
    endless = {"name": "patch", "format": {"type": "grammar", "grammar": grammar}}
    async with served(tokenizer=Bytes()) as server:
        refused = await server.chat(tools=[{"type": "custom", "custom": endless}])
    assert refused.status_code == 400
    assert "'start' refers to itself" in refused.json()["error"]["message"]


async def test_a_conversation_goes_on_with_what_openais_client_has_of_it() -> None:
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    async with served(patch().encode(), tokenizer=Bytes()) as server:
        answer = (await server.chat(tools=[PATCH])).json()
        message = check_shape(answer, ChatCompletion).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        call_id = message.tool_calls[0].id
        messages.append({"role": "tool", "tool_call_id": call_id, "content": "Done."})
        body = {"model": MODEL_ID, "messages": messages, "tools": [PATCH]}
        again = await server.post("/v1/chat/completions", body)
        prompt = (await server.post("/v1/chat/completions/render", body)).json()["prompt"]
    assert again.status_code == 200
    assert json.dumps({"input": TEXT}, ensure_ascii=False) in prompt
