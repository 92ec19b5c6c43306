"""What a chat template gets of calls and their results."""

import json
from typing import Any

import pytest

from app.api.openai.chat.messages import MessageParam
from app.parsing.tool_spec import ToolSpec
from app.parsing.tools.tool_format import call_text
from app.prompts.chat_history import template_messages, with_description
from app.prompts.conversation import ChatMessage
from tests.support.rows import rows
from tests.support.tool_formats import GENERAL, JSON, MISTRAL

CALL_ID = "call_0123456789abcdef"

TOOL = ToolSpec(
    "weather",
    {"type": "object", "properties": {"city": {"type": "string"}}},
    "Wie ist es in Köln?",
)


def turns(*messages: dict[str, Any]) -> list[ChatMessage]:
    return [MessageParam.model_validate(message).to_message() for message in messages]


def call(arguments: str = '{"city": "Köln"}', call_id: str = CALL_ID) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


SYSTEM = {"role": "system", "content": "Be kind."}
USER = {"role": "user", "content": "Weather?"}
CALLING = {"role": "assistant", "content": None, "tool_calls": [call()]}
RESULT = {"role": "tool", "tool_call_id": CALL_ID, "content": "Rain."}


def test_a_template_that_knows_tools_gets_them_in_their_own_fields() -> None:
    thinking = CALLING | {"reasoning": "Look it up."}
    conversation = turns({"role": "developer", "content": "Be brief."}, USER, thinking, RESULT)
    assert template_messages(conversation, JSON) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Look it up.",
            "tool_calls": [
                {
                    "id": CALL_ID,
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"city": "Köln"}},
                }
            ],
        },
        {"role": "tool", "content": "Rain.", "tool_call_id": CALL_ID, "name": "weather"},
    ]


def test_a_result_keeps_its_own_name_and_may_have_no_call() -> None:
    named = RESULT | {"name": "own"}
    lonely = RESULT | {"tool_call_id": "unheard of"}
    rendered = template_messages(turns(CALLING, named, lonely), JSON)
    assert [turn.get("name") for turn in rendered] == [None, "own", None]


@rows(
    ("arguments", "rendered"),
    [
        ("", {}),
        ("{}", {}),
        ('{"a": [1]}', {"a": [1]}),
        ("[1]", "[1]"),
        ("oops", "oops"),
        ('{"a": NaN}', '{"a": NaN}'),
        ("[" * 100_000, "[" * 100_000),
        ('{"a": ' + "9" * 5000 + "}", '{"a": ' + "9" * 5000 + "}"),
    ],
)
def test_arguments_are_an_object_if_they_are_one(arguments: str, rendered: Any) -> None:
    calling = CALLING | {"tool_calls": [call(arguments)]}
    (turn,) = template_messages(turns(calling), JSON)
    assert turn["tool_calls"][0]["function"]["arguments"] == rendered


def test_ids_are_as_long_as_the_template_has_them() -> None:
    _, calling, result = template_messages(turns(USER, CALLING, RESULT), MISTRAL)
    assert calling["tool_calls"][0]["id"] == result["tool_call_id"] == CALL_ID[-9:]
    assert result["name"] == "weather"


def test_for_any_other_template_calls_and_results_are_text() -> None:
    two = {"role": "assistant", "content": "Let me see.", "tool_calls": [call(), call("", "b")]}
    conversation = turns(
        USER,
        two,
        RESULT,
        {"role": "tool", "tool_call_id": "b", "content": "Sun."},
        {"role": "user", "content": "Which?"},
        CALLING,
        RESULT,
        {"role": "assistant", "content": "Rain."},
        USER,
        USER,
    )
    weather = call_text("weather", '{"city": "Köln"}')
    results = "<tool_response>\nRain.\n</tool_response>\n<tool_response>\nSun.\n</tool_response>"
    assert template_messages(conversation, GENERAL) == [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": f"Let me see.\n{weather}\n{call_text('weather', '{}')}",
        },
        {"role": "user", "content": f"{results}\nWhich?"},
        {"role": "assistant", "content": weather},
        {"role": "user", "content": "<tool_response>\nRain.\n</tool_response>"},
        {"role": "assistant", "content": "Rain."},
        {"role": "user", "content": "Weather?"},
        {"role": "user", "content": "Weather?"},
    ]


def test_it_gets_the_tools_in_a_system_message() -> None:
    system, *rest = with_description(turns(USER), [TOOL])
    assert system.role == "system" and rest == turns(USER)
    lines = system.content.splitlines()
    assert json.loads(lines[lines.index("<tools>") + 1]) == TOOL.template_fields()
    assert "Köln" in system.content
    assert call_text("<name>", '{"<parameter>": "<value>"}') in system.content


@pytest.mark.parametrize("role", ["system", "developer"])
def test_the_description_joins_a_system_message_that_is_there(role: str) -> None:
    late = {"role": role, "content": "Be brief."}
    first, system, *rest = with_description(turns(SYSTEM, late, USER, SYSTEM), [TOOL])
    assert [first] == turns(SYSTEM) and rest == turns(USER, SYSTEM)
    assert system.role == role
    assert system.content.startswith("Be brief.\n\n# Tools")
