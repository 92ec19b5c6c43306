"""`tools` beside `response_format` or `structured_outputs`: a call, or an answer in the format."""

import json
from typing import Any

import pytest

from tests.support.chunks import chunks
from tests.support.marker_tokenizer import MarkerTokenizer
from tests.support.speaker import MODEL_ID, served

pytestmark = pytest.mark.anyio

PARAMETERS = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
CALL = b'<tool_call>\n{"name": "add", "arguments": {"x": 12}}\n</tool_call>'
FORMATS: list[dict[str, Any]] = [
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "sum", "schema": PARAMETERS},
        }
    },
    {"structured_outputs": {"json": PARAMETERS}},
]


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_a_call_beside_a_format(format_: dict[str, Any], choice: str) -> None:
    fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    async with served(CALL + b" and more", tokenizer=MarkerTokenizer()) as server:
        answer = (await server.chat("Hi", **fields, **format_)).json()
        stream = chunks(await server.chat("Hi", stream=True, **fields, **format_))
        page = (await server.client.get("/metrics")).text
    assert 'finished_reason="tool_calls"' not in page, "vLLM knows no such reason"
    assert f'request_success_total{{finished_reason="stop",model_name="{MODEL_ID}"}} 2.0' in page
    (made,) = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"x": 12}
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert [c["finish_reason"] for part in stream for c in part["choices"]][-1] == "tool_calls"


@pytest.mark.parametrize("format_", FORMATS)
async def test_an_answer_in_the_format_beside_tools(format_: dict[str, Any]) -> None:
    async with served(b'{"x": 1} and more', tokenizer=MarkerTokenizer()) as server:
        (choice,) = (await server.chat("Hi", tools=TOOLS, **format_)).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ('{"x": 1}', "stop")
    assert "tool_calls" not in choice["message"]
