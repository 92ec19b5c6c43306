"""What a request becomes for the model."""

import json
from dataclasses import replace
from typing import Any, Final

import pytest
from pydantic import ValidationError

from app.api.anthropic.conversation import THINKING, to_conversation, tool_use_id
from app.api.anthropic.request import CountTokensRequest, MessagesRequest
from app.parsing.tool_spec import NamedTool
from app.prompts.conversation import ChatMessage, Conversation, ToolCall
from app.storage.seal import Sealer
from batching import InvalidRequest
from tests.support.rows import rows

SEALER: Final = Sealer(b"a key")
USER: Final = {"role": "user", "content": "Hi"}
CALL: Final = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"x": "é"}}
OTHER_CALL: Final = CALL | {"id": "toolu_2", "input": {}}
ADD: Final = {"name": "add", "input_schema": {"type": "object"}, "description": "Adds."}
WEB_SEARCH: Final = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}


def result(content: Any, call_id: str = "toolu_1", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value, "cache_control": {"type": "ephemeral"}}


def thinking(value: str, **fields: Any) -> dict[str, Any]:
    signature = SEALER.seal(THINKING, value)
    return {"type": "thinking", "thinking": value, "signature": signature, **fields}


def conversation(*messages: dict[str, Any], **fields: Any) -> Conversation:
    body = CountTokensRequest.model_validate({"messages": [*(messages or (USER,))], **fields})
    return to_conversation(body, SEALER)


def turns(*messages: dict[str, Any], **fields: Any) -> list[ChatMessage]:
    """Return the messages, without what is to be cached of them."""
    return [replace(m, breakpoints=()) for m in conversation(*messages, **fields).messages]


HI: Final = ChatMessage(role="user", content="Hi")


@pytest.mark.parametrize("system", ["Be brief.", [text("Be"), text("brief.")]])
def test_the_system_prompt_is_the_first_turn(system: Any) -> None:
    first, second = turns(system=system)
    assert first.role == "system"
    assert first.content.split() == ["Be", "brief."]
    assert second == HI


def test_a_first_block_about_billing_is_left_out() -> None:
    line = text("x-anthropic-billing-header: cc_version=2.1; cch=1f3a;")
    assert turns(system=[line, text("Be brief.")])[0].content == "Be brief."
    assert turns(system=[line]) == [HI]
    assert turns(system=[text("Be brief."), line])[0].content.endswith("cch=1f3a;")


def test_a_system_turn_keeps_its_position() -> None:
    reminder = {"role": "system", "content": [text("It is late.")]}
    answer = {"role": "assistant", "content": "Hello"}
    assert turns(USER, reminder, answer, USER) == [
        HI,
        ChatMessage(role="system", content="It is late."),
        ChatMessage(role="assistant", content="Hello", tool_calls=[]),
        HI,
    ]
    assert conversation().adapt_turns


def test_calls_and_their_results_are_turns() -> None:
    calling = {"role": "assistant", "content": [text("Well."), CALL]}
    returned = {"role": "user", "content": [result("3"), text("Go on.")]}
    assert turns(USER, calling, returned)[1:] == [
        ChatMessage(
            role="assistant", content="Well.", tool_calls=[ToolCall("1", "add", '{"x": "é"}')]
        ),
        ChatMessage(role="tool", content="3", tool_call_id="1"),
        ChatMessage(role="user", content="Go on."),
    ]


def test_results_come_in_the_order_of_the_calls() -> None:
    calling = {"role": "assistant", "content": [CALL, OTHER_CALL]}
    unknown = result("of nothing", "toolu_3")
    returned = {"role": "user", "content": [unknown, result("2", "toolu_2"), result("1")]}
    contents = [turn.content for turn in turns(USER, calling, returned)[2:]]
    assert contents == ["1", "2", "of nothing"]


@rows(
    ("content", "fields", "expected"),
    [
        ("3", {}, "3"),
        ([text("3"), text("4")], {}, "3\n4"),
        ([], {}, ""),
        (None, {}, ""),
        ("no such file", {"is_error": True}, "Error: no such file"),
    ],
)
def test_a_result_is_text(content: Any, fields: dict[str, Any], expected: str) -> None:
    assert turns({"role": "user", "content": [result(content, **fields)]})[0].content == expected


def test_a_call_keeps_the_models_own_id() -> None:
    for call_id in ("functions.add:0", "call_1f"):
        client_id = tool_use_id(call_id)
        block = CALL | {"id": client_id}
        turn = turns({"role": "assistant", "content": [block]}, USER)[0]
        assert client_id.startswith("toolu_")
        assert turn.tool_calls[0].id == call_id.removeprefix("call_")


def test_thinking_comes_back_as_reasoning() -> None:
    shown, omitted = thinking("Hm."), thinking("Aha.", thinking="")
    redacted = {"type": "redacted_thinking", "data": SEALER.seal(THINKING, "So.")}
    answer = {"role": "assistant", "content": [shown, omitted, redacted, text("3")]}
    turn = turns(USER, answer, USER)[1]
    assert (turn.reasoning, turn.content) == ("Hm.\nAha.\nSo.", "3")


@rows(
    ("block", "message"),
    [
        (thinking("Hm.", signature="forged"), "Invalid `signature` in `thinking` block"),
        (thinking("Hm.", signature=""), "Invalid `signature` in `thinking` block"),
        (thinking("Hm.", thinking="Changed."), "Invalid `signature` in `thinking` block"),
        (thinking("Hm.", signature=SEALER.seal("other", "Hm.")), "Invalid `signature`"),
        ({"type": "redacted_thinking", "data": "x"}, "Invalid `data` in `redacted_thinking` block"),
    ],
)
def test_a_forged_signature_is_refused(block: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        turns(USER, {"role": "assistant", "content": [text("3"), block]}, USER)
    assert caught.value.param == "messages.1.content.1"


def test_thinking_that_is_longer_unsealed_than_any_body_is_refused() -> None:
    block = thinking(" " * (3 << 20), thinking="")
    assert len(json.dumps(block)) < 10_000
    turns(USER, {"role": "assistant", "content": [block]}, USER)
    with pytest.raises(InvalidRequest, match="its thinking is longer than 4194304 characters"):
        turns(USER, {"role": "assistant", "content": [block, block]}, USER)


def test_a_last_turn_of_the_assistant_is_continued() -> None:
    begun = conversation(USER, {"role": "assistant", "content": "The answer is"})
    assert (begun.continue_final_message, begun.add_generation_prompt) == (True, False)
    empty = conversation(USER, {"role": "assistant", "content": ""})
    assert (empty.continue_final_message, empty.add_generation_prompt) == (False, True)
    assert empty.messages == [HI]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([USER, {"role": "assistant", "content": [CALL]}], "has no results of them"),
        ([{"role": "assistant", "content": ""}], "there is no turn to complete"),
    ],
)
def test_a_last_turn_that_cannot_be_continued_is_refused(messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        conversation(*messages)


def test_a_deferred_tool_is_described_where_it_is_referred_to() -> None:
    tools = [ADD, ADD | {"name": "later", "defer_loading": True, "strict": True}]
    reference = {"type": "tool_reference", "tool_name": "later"}
    found = {"role": "user", "content": [result([text("Found:"), reference])]}
    made = conversation(found, tools=tools)
    assert [tool.name for tool in made.described_tools] == ["add"]
    assert [(tool.name, tool.strict) for tool in made.offered_tools] == [
        ("add", False),
        ("later", True),
    ]
    first, *lines = made.messages[0].content.split("\n")
    assert (first, lines[0], lines[2]) == ("Found:", "<tools>", "</tools>")
    assert json.loads(lines[1])["function"] == {
        "name": "later",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {}},
    }


def test_a_tool_is_described_once() -> None:
    tools = [ADD, ADD | {"name": "later", "defer_loading": True}]
    reference = {"type": "tool_reference", "tool_name": "later"}
    made = conversation({"role": "user", "content": [result([reference] * 3)]}, tools=tools)
    content = made.messages[0].content
    assert content.count("<tools>") == 1
    assert content.endswith("</tools>\nlater\nlater")


def test_a_reference_to_a_tool_that_is_not_there_is_refused() -> None:
    reference = {"type": "tool_reference", "tool_name": "gone"}
    with pytest.raises(InvalidRequest, match="'gone', which is not in tools"):
        conversation({"role": "user", "content": [result([reference])]}, tools=[ADD])


@rows(
    ("choice", "expected", "is_parallel"),
    [
        (None, "auto", True),
        ({"type": "auto"}, "auto", True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any"}, "required", True),
        ({"type": "none"}, "none", True),
        (
            {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
            NamedTool("add"),
            False,
        ),
    ],
)
def test_which_tool_is_called(choice: Any, expected: Any, is_parallel: bool) -> None:
    made = conversation(tools=[ADD, WEB_SEARCH], tool_choice=choice)
    assert made.tool_choice == expected
    assert made.parallel_tool_calls == is_parallel
    assert [tool.name for tool in made.tools] == ["add"]


def test_tools_of_servers_alone_are_none() -> None:
    assert conversation(tools=[WEB_SEARCH]).tool_choice == "none"


@rows(
    ("fields", "switch", "effort"),
    [
        ({}, None, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, True, None),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, True, "high"),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}, False, "low"),
    ],
)
def test_thinking_is_switched(fields: Any, switch: bool | None, effort: str | None) -> None:
    made = conversation(**fields)
    assert (made.thinking, made.reasoning_effort) == (switch, effort)


FOUND: Final = {"type": "search_result", "source": "http://x", "title": "y", "content": []}


@rows(
    ("fields", "message"),
    [
        (
            {"messages": [{"role": "user", "content": [FOUND]}]},
            "type 'search_result' cannot be read",
        ),
        (
            {"messages": [{"role": "user", "content": [result([FOUND])]}]},
            "type 'search_result' cannot be read",
        ),
        ({"messages": [{"role": "user", "content": [3]}]}, "a block must be an object"),
        ({"messages": [{"role": "user", "content": [{"type": []}]}]}, "a block must be an object"),
        ({"messages": [{"role": "user", "content": 3}]}, "valid list"),
        ({"messages": [{"role": "user", "content": [text("")] * 8193}] * 2}, "more than 16384"),
        (
            {"messages": [{"role": "user", "content": [result([text("")] * 8192)] * 2}]},
            "more than 16384",
        ),
        ({"messages": [3]}, "valid dictionary"),
        ({"messages": [USER] * 8193}, "8193 items"),
        ({"messages": 3}, "valid list"),
        ({"messages": []}, "at least 1 item"),
        (
            {"messages": [{"role": "user", "content": [CALL]}]},
            "user has no blocks of type tool_use",
        ),
        ({"messages": [{"role": "system", "content": [thinking("")]}]}, "system has no blocks"),
        ({"messages": [{"role": "tool", "content": "3"}]}, "'user', 'assistant' or 'system'"),
        (
            {"messages": [{"role": "assistant", "content": [CALL | {"input": {"x": "\ud800"}}]}]},
            "half of a surrogate pair",
        ),
        ({"tools": [3]}, "a tool must be an object"),
        ({"tools": [ADD, ADD]}, "two tools have the same name"),
        ({"tools": [{"name": "add"}]}, "Field required"),
        ({"tool_choice": {"type": "tool"}}, "the type 'tool' needs it"),
        ({"tool_choice": {"type": "any"}}, "'any' needs tools"),
        ({"tools": [WEB_SEARCH], "tool_choice": {"type": "any"}}, "'any' needs tools"),
        (
            {"tools": [WEB_SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}},
            "the server tool 'web_search' is not supported",
        ),
        (
            {"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}},
            "there is no tool named 'sub'",
        ),
        ({"mcp_servers": [{"name": "x"}]}, "this is not supported"),
        ({"output_format": {"type": "json_schema"}}, "this is not supported"),
        ({"fallbacks": [{"model": "m"}]}, "this is not supported"),
        ({"thread": {"type": "create"}}, "this is not supported"),
    ],
)
def test_what_cannot_be_served_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CountTokensRequest.model_validate({"messages": [USER], **fields})


@pytest.mark.parametrize(
    ("block", "path"),
    [
        (FOUND, ("search_result",)),
        (result([FOUND]), ("tool_result", "content", 0, "search_result")),
    ],
)
def test_a_block_that_cannot_be_read_is_named_with_its_type(
    block: dict[str, Any], path: tuple[str | int, ...]
) -> None:
    """Claude Code leaves it out then and goes on."""
    body = {"messages": [{"role": "user", "content": [block]}]}
    with pytest.raises(ValidationError) as caught:
        CountTokensRequest.model_validate(body)
    (error,) = caught.value.errors()
    assert (*error["loc"], error["ctx"]["param"]) == ("messages", 0, "content", 0, *path)


def test_a_block_of_a_type_that_is_no_name_is_named_by_its_place() -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "no name"}]}]}
    with pytest.raises(ValidationError) as caught:
        CountTokensRequest.model_validate(body)
    assert "param" not in caught.value.errors()[0]["ctx"]


def test_a_conversation_is_counted_but_not_compacted() -> None:
    body = {"messages": [USER], "compaction": {"type": "summarize"}}
    CountTokensRequest.model_validate(body)
    with pytest.raises(ValidationError) as caught:
        MessagesRequest.model_validate(body)
    assert caught.value.errors()[0]["ctx"] == {"param": "compaction"}
    MessagesRequest.model_validate(body | {"compaction": None, "thread": None})


def test_parameters_of_a_completion() -> None:
    body = MessagesRequest.model_validate(
        {
            "messages": [USER],
            "max_tokens": 128_000,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "stop_sequences": ["\n\nHuman:"] * 32,
            "metadata": {"user_id": "u"},
            "context_management": {"edits": []},
            "service_tier": "standard_only",
            "mcp_servers": [],
            "fallbacks": "default",
        }
    )
    params = body.to_generation_params(())
    assert params.clamp_max_tokens
    assert (
        params.max_tokens,
        params.temperature,
        params.top_p,
        params.top_k,
        len(params.stop),
    ) == (
        128_000,
        0.5,
        0.9,
        5,
        32,
    )
