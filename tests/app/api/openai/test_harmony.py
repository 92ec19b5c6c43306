"""gpt-oss's format over HTTP: what is streamed, and the prompt of the next turn."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from tests.support.chunks import chunks
from tests.support.harmony_model import harmony_tokenizer
from tests.support.marker_tokenizer import MarkerTokenizer
from tests.support.rows import rows
from tests.support.speaker import Served, served

pytestmark = pytest.mark.anyio

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
ANALYSIS = "<|channel|>analysis<|message|>Need the weather.<|end|>"
PREAMBLE = "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json"
    '<|message|>{"city": "Köln"}'
)
FINAL = "<|start|>assistant<|channel|>final<|message|>It rains."
USER = {"role": "user", "content": "Weather?"}
MADE = {
    "id": "1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Köln"}'},
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "Rain."}


def saying(
    text: str, tokenizer: MarkerTokenizer | None = None
) -> AbstractAsyncContextManager[Served]:
    tokenizer = tokenizer or harmony_tokenizer()
    return served(tokenizer.encode(text), tokenizer=tokenizer)


async def prompt_of(server: Served, *messages: Any, **fields: Any) -> str:
    body = {"messages": messages, "tools": TOOLS, **fields}
    response = await server.post("/v1/chat/completions/render", body)
    assert response.status_code == 200, response.text
    return str(response.json()["prompt"])


async def deltas_of(server: Served, **fields: Any) -> list[dict[str, Any]]:
    parts = chunks(await server.chat("Weather?", stream=True, **fields))
    return [choice["delta"] for part in parts for choice in part["choices"]]


def joined(deltas: Sequence[dict[str, Any]], name: str) -> str:
    return "".join(delta.get(name) or "" for delta in deltas)


async def test_reasoning_and_a_call() -> None:
    async with saying(ANALYSIS + PREAMBLE + CALL) as server:
        answer = (await server.chat("Weather?", tools=TOOLS)).json()
        deltas = await deltas_of(server, tools=TOOLS)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning"] == "Need the weather."
    assert choice["message"]["content"] == "I look."
    (made,) = choice["message"]["tool_calls"]
    assert made["function"] == {"name": "weather", "arguments": '{"city": "Köln"}'}
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] >= len("Need the")
    assert joined(deltas, "reasoning") == "Need the weather."
    assert joined(deltas, "content") == "I look."
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert calls[0]["function"] == {"name": "weather", "arguments": ""}
    assert len(calls) > 5
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Köln"}'


async def test_reasoning_and_content() -> None:
    async with saying(ANALYSIS + FINAL) as server:
        answer = (await server.chat("Weather?")).json()
        deltas = await deltas_of(server)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["reasoning"] == joined(deltas, "reasoning") == "Need the weather."
    assert choice["message"]["content"] == joined(deltas, "content") == "It rains."


@rows("ends", [("<|return|>", "<|call|>"), ("<|return|>",), ()])
async def test_a_message_ends_at_its_last_marker(ends: tuple[str, ...]) -> None:
    tokenizer = harmony_tokenizer(ends=ends)
    for text, fields, reason in (
        (ANALYSIS + FINAL + "<|return|>", {}, "stop"),
        (ANALYSIS + CALL + "<|call|>", {"tools": TOOLS}, "tool_calls"),
    ):
        async with saying(text + FINAL, tokenizer) as server:
            answer = (await server.chat("Weather?", **fields)).json()
            num_unfinished = await server.num_unfinished()
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == reason
        assert answer["usage"]["completion_tokens"] == len(tokenizer.encode(text))
        assert num_unfinished == 0


async def test_a_call_that_is_cut_leaves_no_markup() -> None:
    async with saying(ANALYSIS + CALL) as server:
        num_tokens = len(harmony_tokenizer().encode(ANALYSIS + CALL))
        seen = set()
        for max_tokens in range(1, num_tokens):
            answer = (await server.chat("Hi", tools=TOOLS, max_tokens=max_tokens)).json()
            (choice,) = answer["choices"]
            assert choice["finish_reason"] == "length"
            assert not choice["message"]["content"]
            calls = choice["message"].get("tool_calls", [])
            seen.add(calls[0]["function"]["arguments"] if calls else None)
    assert {None, "", '{"city": "K'} <= seen


async def test_a_stop_string_in_a_call_is_no_call() -> None:
    async with saying(ANALYSIS + CALL) as server:
        (choice,) = (await server.chat("Hi", tools=TOOLS, stop=["öln"])).json()["choices"]
    (made,) = choice["message"]["tool_calls"]
    assert made["function"]["arguments"] == '{"city": "K'
    assert choice["finish_reason"] == "stop"


@rows(
    ("fields", "text"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, CALL),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, CALL),
        (
            {"tools": TOOLS, "response_format": {"type": "json_object"}},
            "<|start|>assistant<|channel|>final<|message|>{}",
        ),
        (
            {"response_format": {"type": "json_object"}},
            "<|start|>assistant<|channel|>final<|message|>{}",
        ),
    ],
)
async def test_a_grammar_ends_the_message(fields: dict[str, Any], text: str) -> None:
    async with saying(ANALYSIS + text + FINAL) as server:
        answer = (await server.chat("Weather?", **fields)).json()
    (choice,) = answer["choices"]
    assert choice["message"]["reasoning"] == "Need the weather."
    assert choice["finish_reason"] == ("tool_calls" if text == CALL else "stop")
    assert choice["message"]["content"] == (None if text == CALL else "{}")


async def test_a_second_turn() -> None:
    async with saying(ANALYSIS + CALL) as server:
        first = await prompt_of(server, USER)
        message = (await server.chat("Weather?", tools=TOOLS)).json()["choices"][0]["message"]
        result = RESULT | {"tool_call_id": message["tool_calls"][0]["id"]}
        second = await prompt_of(server, USER, message, result)
        answered = {"role": "assistant", "content": "It rains."}
        third = await prompt_of(server, USER, message, result, answered, USER)
        follow_up = await server.chat(messages=[USER, message, result], tools=TOOLS)
    # All that was generated before the call is in the next prompt as it was.
    assert second == (
        f"{first}{ANALYSIS}<|start|>assistant to=functions.weather<|channel|>commentary json"
        '<|message|>{"city": "Köln"}<|call|><|start|>functions.weather to=assistant'
        '<|channel|>commentary<|message|>"Rain."<|end|><|start|>assistant'
    )
    assert "Need the weather." not in third
    assert follow_up.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_content_before_a_call_is_rendered_as_it_was_generated() -> None:
    turn = {"role": "assistant", "content": "I look.", "tool_calls": [MADE]}
    async with saying("") as server:
        first = await prompt_of(server, USER)
        both = await prompt_of(server, USER, turn | {"reasoning": "Need the weather."}, RESULT)
        alone = await prompt_of(server, USER, turn, RESULT)
    assert both.startswith(first + ANALYSIS + PREAMBLE + "<|start|>assistant to=functions.weather")
    assert "I look." in alone


async def test_calls_of_one_turn_are_rendered_each_with_its_result() -> None:
    other = MADE | {"id": "2", "function": {"name": "now", "arguments": "{}"}}
    turn = {"role": "assistant", "reasoning": "Both.", "tool_calls": [MADE, other]}
    late = RESULT | {"tool_call_id": "2", "content": "Noon."}
    stray = RESULT | {"tool_call_id": "3", "content": "Stray."}
    async with saying("") as server:
        prompt = await prompt_of(server, USER, turn, late, RESULT, stray, USER)
    parts = ["Both.", "to=functions.weather", '"Rain."', "to=functions.now", '"Noon."', '"Stray."']
    positions = [prompt.index(part) for part in parts]
    assert positions == sorted(positions)
    assert all(prompt.count(part) == 1 for part in parts)


@pytest.mark.parametrize(
    ("effort", "rendered"),
    [("none", "low"), ("minimal", "low"), ("low", "low"), ("high", "high"), ("max", "high")],
)
async def test_the_effort_is_one_that_the_model_knows(effort: str, rendered: str) -> None:
    async with saying("") as server:
        prompt = await prompt_of(server, USER, reasoning_effort=effort)
        default = await prompt_of(server, USER)
    assert f"Effort: {rendered}<" in prompt
    assert "Effort: medium<" in default


async def test_the_last_message_is_continued_in_its_channel() -> None:
    fields = {
        "messages": [USER, {"role": "assistant", "content": "So: "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    async with saying('{"a": 1}') as server:
        free = (await server.chat(**fields)).json()
        asked = (await server.chat(**fields, response_format={"type": "json_object"})).json()
    for answer in (free, asked):
        assert answer["choices"][0]["message"]["content"] == '{"a": 1}'


async def test_a_call_cannot_be_required_where_the_answer_has_begun() -> None:
    fields = {
        "messages": [USER, {"role": "assistant", "content": "So: "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "tools": TOOLS,
        "tool_choice": "required",
    }
    async with saying(CALL) as server:
        response = await server.chat(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"


async def test_results_of_calls_with_one_id_are_rendered_once() -> None:
    made = {"role": "assistant", "tool_calls": [MADE] * 3}
    async with saying("") as server:
        prompt = await prompt_of(server, USER, made, *[RESULT] * 3)
    assert prompt.count("Rain.") == 3
