"""Budgets of thinking over HTTP: each API's fields, and what comes of them in each format."""

import json
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from mlx_lm.tool_parsers import json_tools

from tests.support.chunks import chunks
from tests.support.harmony_model import harmony_tokenizer
from tests.support.marker_tokenizer import PLAIN_TEMPLATE, MarkerTokenizer
from tests.support.speaker import Served, served
from tests.support.thinking import Undaunted

pytestmark = pytest.mark.anyio

# As Qwen3's: a history with line breaks around the end, and a switch.
HISTORY = "{# '<think>\\n' + reasoning + '\\n</think>\\n\\n' + content, '<think></think>' #}"
SWITCH = (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
OPENING = "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
MARKERS = ("<think>", "</think>")
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
HARMONY_CALL = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}"


def marked(template: str = PLAIN_TEMPLATE, *, is_spelt: bool = False) -> MarkerTokenizer:
    made = MarkerTokenizer(
        plain=() if is_spelt else MARKERS, think=MARKERS, template=f"{{# tools #}}{template}"
    )
    made.tool_parser = json_tools.parse_tool_call
    made.tool_call_start, made.tool_call_end = "<tool_call>", "</tool_call>"
    return made


def saying(
    text: str, tokenizer: MarkerTokenizer | None = None
) -> AbstractAsyncContextManager[Served]:
    tokenizer = tokenizer or marked()
    return served(tokenizer.encode(text), tokenizer=tokenizer, runner=Undaunted)


def parts(answer: dict[str, Any]) -> list[tuple[Any, Any, Any]]:
    """Return the reasoning, the content and the finish reason of each choice."""
    return [
        (c["message"].get("reasoning"), c["message"]["content"], c["finish_reason"])
        for c in answer["choices"]
    ]


def num_reasoning(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["completion_tokens_details"]["reasoning_tokens"])


@pytest.mark.parametrize("is_spelt", [False, True])
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(
    ("budget", "reasoning", "content"),
    [(1, "A", "BCDEFGHYES"), (5, "ABCDE", "FGHYES"), (8, "ABCDEFGH", "YES")],
)
async def test_what_the_model_says_behind_the_budget_is_content(
    budget: int, reasoning: str, content: str, is_open: bool, is_spelt: bool
) -> None:
    tokenizer = marked(PLAIN_TEMPLATE + OPENING * is_open + HISTORY, is_spelt=is_spelt)
    async with saying("<think>" * (not is_open) + "ABCDEFGHYES", tokenizer) as server:
        asked = {"thinking_token_budget": budget, "n": 2}
        answer = (await server.chat(**asked)).json()
        streamed = chunks(await server.chat(**asked, stream=True))
    assert parts(answer) == 2 * [(reasoning, content, "stop")]
    for index in range(2):
        deltas = [c["delta"] for p in streamed for c in p["choices"] if c["index"] == index]
        assert "".join(d.get("reasoning") or "" for d in deltas) == reasoning
        assert "".join(d.get("content") or "" for d in deltas) == content
    # The tokens of the thought and of its end, line breaks included.
    end = ["\n", *("</think>" if is_spelt else ["</think>"]), "\n", "\n"]
    assert num_reasoning(answer) == 2 * (budget + len(end))


async def test_a_marker_that_has_begun_is_finished() -> None:
    tokenizer = marked(PLAIN_TEMPLATE + HISTORY, is_spelt=True)
    async with saying("<think>AB\n</thYES", tokenizer) as server:
        answer = (await server.chat(thinking_token_budget=len("AB\n</th"))).json()
    assert parts(answer) == [("AB", "YES", "stop")]


@pytest.mark.parametrize("budget", [9, 100, -1])
async def test_a_thought_that_ends_in_time_is_left_alone(budget: int) -> None:
    said = "<think>ABCDEFGH</think>YES"
    async with saying(said, marked(PLAIN_TEMPLATE + HISTORY)) as server:
        answer = (await server.chat(thinking_token_budget=budget)).json()
    assert parts(answer) == [("ABCDEFGH", "YES", "stop")]
    assert num_reasoning(answer) == len("ABCDEFGH") + 1


async def test_the_tokens_that_are_forced_are_those_of_the_template() -> None:
    tokenizer = marked(PLAIN_TEMPLATE + HISTORY)
    async with saying("<think>ABC", tokenizer) as server:
        answer = (await server.chat(thinking_token_budget=2, return_token_ids=True)).json()
    text = tokenizer.decode(answer["choices"][0]["token_ids"])
    assert text == "<think>AB\n</think>\n\nC<|endoftext|>"


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_token_budget": 2},
        {"thinking_budget_tokens": 2},
        {"thinking": {"type": "enabled", "budget_tokens": 2}},
        {"reasoning": {"max_tokens": 2}},
    ],
)
async def test_each_name_of_the_budget_is_one(fields: dict[str, Any]) -> None:
    async with saying("<think>ABC") as server:
        assert parts((await server.chat(**fields)).json()) == [("AB", "C", "stop")]


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_token_budget": 0},
        {"reasoning_effort": "none"},
        {"enable_thinking": False},
        {"thinking": {"type": "disabled"}},
        {"reasoning": {"enabled": False}},
    ],
)
@pytest.mark.parametrize(
    "template", [PLAIN_TEMPLATE + SWITCH, PLAIN_TEMPLATE, PLAIN_TEMPLATE + "<think>"]
)
async def test_reasoning_that_is_not_wanted_is_skipped_or_ended_at_once(
    fields: dict[str, Any], template: str
) -> None:
    """Where the template has a switch, it is used; else the model that begins to reason has to stop."""
    is_open, is_skipped = template.endswith("<think>"), template.endswith(SWITCH)
    said = "ABC" if is_open or is_skipped else "<think>ABC"
    async with saying(said, marked(template)) as server:
        answer = (await server.chat(**fields)).json()
    assert [content for _, content, _ in parts(answer)] == ["ABC"]
    assert "reasoning" not in answer["choices"][0]["message"]


async def test_effort_sets_no_budget_but_that_of_none() -> None:
    async with saying("<think>ABC</think>YES") as server:
        for effort in ("minimal", "low", "high"):
            answer = (await server.chat(reasoning_effort=effort)).json()
            assert parts(answer) == [("ABC", "YES", "stop")]
        # Who says that it is to reason is believed.
        asked = {"reasoning_effort": "none", "enable_thinking": True}
        assert parts((await server.chat(**asked)).json()) == [("ABC", "YES", "stop")]


async def test_the_template_may_know_the_budget() -> None:
    template = PLAIN_TEMPLATE + "{{ thinking_budget }}:"
    async with saying("", marked(template)) as server:
        body = {"messages": [{"role": "user", "content": "Hi"}], "thinking_token_budget": 7}
        prompt = (await server.post("/v1/chat/completions/render", body)).json()["prompt"]
    assert prompt.endswith("assistant:7:")


async def test_a_model_that_does_not_reason_has_no_budget() -> None:
    async with saying("ABC", MarkerTokenizer()) as server:
        assert parts((await server.chat(thinking_token_budget=1)).json()) == [(None, "ABC", "stop")]


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_a_call_follows_a_thought_that_was_ended(choice: str) -> None:
    async with saying("<think>ABC" + CALL) as server:
        asked = {"tools": TOOLS, "tool_choice": choice, "thinking_token_budget": 3}
        (choice_,) = (await server.chat(**asked)).json()["choices"]
    assert choice_["finish_reason"] == "tool_calls"
    assert choice_["message"]["reasoning"] == "ABC"
    (call,) = choice_["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": "{}"}


async def test_the_marker_in_arguments_is_text() -> None:
    call = CALL.replace("{}", json.dumps({"a": "<think>" + "B" * 40}))
    async with saying("<think>ABC</think>" + call) as server:
        asked = {"tools": TOOLS, "thinking_token_budget": 4}
        (choice,) = (await server.chat(**asked)).json()["choices"]
    (made,) = choice["message"]["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"a": "<think>" + "B" * 40}


@pytest.mark.parametrize("is_spelt", [False, True])
@pytest.mark.parametrize(
    "template", [PLAIN_TEMPLATE, PLAIN_TEMPLATE + HISTORY, PLAIN_TEMPLATE + OPENING]
)
@pytest.mark.parametrize("budget", [0, 1, 3])
async def test_a_format_is_kept_behind_a_thought_that_was_ended(
    budget: int, template: str, is_spelt: bool
) -> None:
    start = "" if template.endswith(OPENING) else "<think>"
    asked = {"structured_outputs": {"regex": "[A-Z]+"}, "thinking_token_budget": budget}
    asked["enable_thinking"] = True
    async with saying(start + "ABCDE", marked(template, is_spelt=is_spelt)) as server:
        answer = (await server.chat(**asked)).json()
    assert parts(answer) == [("ABCDE"[:budget] or None, "ABCDE"[budget:], "stop")]


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("fields", [{}, {"structured_outputs": {"regex": "[A-Z]+"}}])
async def test_an_analysis_is_ended_and_the_final_channel_follows(
    budget: int, fields: dict[str, Any]
) -> None:
    async with saying(ANALYSIS + "ABCDEFG", harmony_tokenizer()) as server:
        answer = (await server.chat(thinking_token_budget=budget, **fields)).json()
        own = (await server.chat(reasoning_effort="none", **fields)).json()
    assert parts(answer) == [("ABCDEFG"[:budget] or None, "ABCDEFG"[budget:], "stop")]
    assert parts(own) == [(None, "ABCDEFG", "stop")]


async def test_an_analysis_that_ends_in_time_is_left_alone() -> None:
    said = ANALYSIS + "ABC<|end|>" + FINAL + "YES"
    async with saying(said, harmony_tokenizer()) as server:
        answer = (await server.chat(thinking_token_budget=9)).json()
    assert parts(answer) == [("ABC", "YES", "stop")]


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_an_analysis_that_is_ended_may_be_followed_by_a_call(choice: str) -> None:
    async with saying(ANALYSIS + "ABC" + HARMONY_CALL, harmony_tokenizer()) as server:
        asked = {"tools": TOOLS, "tool_choice": choice, "thinking_token_budget": 3}
        (choice_,) = (await server.chat(**asked)).json()["choices"]
    assert choice_["message"]["reasoning"] == "ABC"
    assert choice_["message"]["tool_calls"][0]["function"]["name"] == "add"


async def test_a_message_that_goes_on_in_its_thought_has_a_budget_too() -> None:
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>ab"},
    ]
    asked = {
        "messages": turns,
        "add_generation_prompt": False,
        "continue_final_message": True,
        "thinking_token_budget": 2,
    }
    async with saying("ABCD") as server:
        answer = (await server.chat(**asked)).json()
    assert parts(answer) == [("AB", "CD", "stop")]


async def test_anthropic_s_budget() -> None:
    async with saying("<think>ABCD") as server:
        thinking = {"type": "enabled", "budget_tokens": 3}
        message = (await server.message(thinking=thinking)).json()
        off = (await server.message(thinking={"type": "disabled"})).json()
        largest = await server.message(
            thinking={"type": "enabled", "budget_tokens": 31999}, max_tokens=32000
        )
        unsaid = await server.message(thinking=thinking, max_tokens=None)
        refused = [
            (await server.message(thinking=each, max_tokens=limit)).json()["error"]["message"]
            for each, limit in (
                ({"type": "enabled", "budget_tokens": 64}, 64),
                ({"type": "disabled", "budget_tokens": 9}, 64),
                ({"type": "enabled", "budget_tokens": -1}, 64),
            )
        ]
    first, second = message["content"]
    assert (first["thinking"], second["text"]) == ("ABC", "D")
    assert message["stop_reason"] == "end_turn"
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": 4}
    assert [block.get("text") for block in off["content"]] == ["ABCD"]
    assert largest.status_code == unsaid.status_code == 200
    assert "max_tokens must be greater than this" in refused[0]
    assert "type: disabled" in refused[1]
    assert all("thinking.budget_tokens" in message for message in refused)


async def test_a_budget_of_responses() -> None:
    async with saying("<think>ABCD") as server:
        asked = {"input": "Hi", "reasoning": {"max_tokens": 3, "effort": "low"}}
        answer = (await server.post("/v1/responses", asked)).json()
        free = {"input": "Hi", "reasoning": {"max_tokens": -1}}
        unlimited = (await server.post("/v1/responses", free)).json()
        off = (
            await server.post("/v1/responses", {"input": "Hi", "reasoning": {"effort": "none"}})
        ).json()
    reasoning, message = answer["output"]
    assert reasoning["content"][0]["text"] == "ABC"
    assert message["content"][0]["text"] == "D"
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 4
    assert [item["type"] for item in unlimited["output"]] == ["reasoning"]
    assert [item["type"] for item in off["output"]] == ["message"]


async def test_a_budget_changes_no_completion_of_text() -> None:
    async with saying("ABC") as server:
        refused = (await server.complete(thinking_token_budget=5)).json()["error"]
        free = await server.complete(thinking_token_budget=-1)
    assert refused["param"] == "thinking_token_budget"
    assert free.status_code == 200
