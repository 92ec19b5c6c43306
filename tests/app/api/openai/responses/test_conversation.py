"""What becomes of the items of a request: turns of a conversation, and tools of the model."""

from typing import Any, Final

import pytest
from pydantic import ValidationError

from app.api.openai.responses.conversation import to_conversation, unsealed
from app.api.openai.responses.items.input_items import CompactionTrigger, ItemReference
from app.api.openai.responses.request import ResponseRequest
from app.parsing.tool_spec import AllowedTools, FreeformInput, NamedTool, ToolSpec
from app.prompts.conversation import ChatMessage, Conversation, ToolCall
from app.storage.seal import Sealer
from batching import InvalidRequest, Priority
from tests.support.responses import custom, function
from tests.support.rows import rows

SEALER: Final = Sealer(b"k" * 32)


def request(input_: Any = "Hi", **fields: Any) -> ResponseRequest:
    return ResponseRequest.model_validate({"input": input_} | fields)


def conversation(input_: Any = "Hi", **fields: Any) -> Conversation:
    body = request(input_, **fields)
    items = [item for item in body.input if not isinstance(item, ItemReference | CompactionTrigger)]
    return to_conversation(body, unsealed(items, SEALER))


def messages(input_: Any, **fields: Any) -> list[ChatMessage]:
    return list(conversation(input_, **fields).messages)


def user(text: str = "Hi") -> ChatMessage:
    return ChatMessage(role="user", content=text)


def rejection(input_: Any = "Hi", **fields: Any) -> tuple[str, str]:
    """Return the field that is at fault, and why."""
    with pytest.raises(ValidationError) as caught:
        request(input_, **fields)
    error = caught.value.errors()[0]
    context = error.get("ctx", {})
    where = [*map(str, error["loc"]), *([context["param"]] if "param" in context else [])]
    return ".".join(where), error["msg"]


@rows(
    "item",
    [
        {"role": "user", "content": "Hi"},
        {"type": None, "role": "user", "content": "Hi"},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "user", "content": "Hi"},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}], "phase": None},
        {"type": "message", "role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ],
)
def test_the_spellings_of_a_message(item: dict[str, Any]) -> None:
    assert messages([item]) == messages("Hi") == [user()]


def test_parts_are_lines() -> None:
    parts = [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}]
    parts += [{"type": "refusal", "refusal": "b"}]
    assert messages([{"role": "assistant", "content": parts}])[0].content == "a\nb"


def test_instructions_and_the_system_messages_after_them_are_one_turn() -> None:
    items = [
        {"role": "developer", "content": "two"},
        {"role": "system", "content": "three"},
        {"role": "user", "content": "Hi"},
        {"role": "developer", "content": "four"},
    ]
    system = ChatMessage(role="system", content="one\n\ntwo\n\nthree")
    later = ChatMessage(role="developer", content="four")
    assert messages(items, instructions="one") == [system, user(), later]
    assert messages("Hi", instructions="") == [user()]
    assert messages([], instructions="one") == [ChatMessage(role="system", content="one")]


def test_what_the_assistant_wrote_at_once_is_one_turn() -> None:
    items = [
        {"role": "user", "content": "Hi"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
            "encrypted_content": None,
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Well."}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "add", "arguments": "{}"},
        {
            "type": "function_call",
            "call_id": "b",
            "name": "spawn",
            "namespace": "agents",
            "arguments": '{"x": 1}',
        },
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": '"é"\n'},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {
            "type": "function_call_output",
            "call_id": "b",
            "output": [{"type": "input_text", "text": "2"}, {"type": "input_text", "text": "3"}],
        },
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
        {"role": "assistant", "content": "So."},
    ]
    turn = ChatMessage(
        role="assistant",
        content="Well.",
        reasoning="hm",
        tool_calls=(
            ToolCall("a", "add", "{}"),
            ToolCall("b", "agents__spawn", '{"x": 1}'),
            ToolCall("c", "patch", '{"input": "\\"é\\"\\n"}'),
        ),
    )
    results = [
        ChatMessage(role="tool", content=text, tool_call_id=call_id)
        for call_id, text in (("a", "1"), ("b", "2\n3"), ("c", "done"))
    ]
    last = ChatMessage(role="assistant", content="So.")
    assert messages(items) == [user(), turn, *results, last]


@rows(
    "fields",
    [
        {"content": [{"type": "reasoning_text", "text": "hm"}]},
        {"summary": [{"type": "summary_text", "text": "hm"}]},
        {"encrypted_content": SEALER.seal("reasoning", "hm"), "summary": []},
        {"encrypted_content": SEALER.seal("reasoning", "hm"), "content": "other"},
    ],
)
def test_reasoning_comes_back_however_it_was_kept(fields: dict[str, Any]) -> None:
    items = [{"type": "reasoning", "summary": []} | fields, {"role": "assistant", "content": "4"}]
    assert messages(items) == [ChatMessage(role="assistant", content="4", reasoning="hm")]


@rows("value", ["", "forged", SEALER.seal("thinking", "hm")])
def test_reasoning_that_was_not_sealed_here_is_rejected(value: str) -> None:
    items = ["Hi", {"type": "reasoning", "summary": [], "encrypted_content": value}]
    with pytest.raises(InvalidRequest) as caught:
        messages([{"role": "user", "content": "Hi"}, *items[1:]])
    assert caught.value.param == "input.1.encrypted_content"


NOT_READ: Final[list[tuple[Any, str]]] = [
    ([{"role": "tool", "content": ""}], "input.0.role"),
    ([{"role": "user"}], "input.0.content"),
    ([{"role": "user", "content": [{"type": "input_image"}]}], "input.0.content"),
    ([{"role": "user", "content": [{"type": "input_file"}]}], "input.0.content"),
    ([{"role": "user", "content": [{"type": "input_text"}]}], "input.0.content"),
    ([{"role": "user", "content": ["a"]}], "input.0.content"),
    ([{"role": "user", "content": [{"type": 1}]}], "input.0.content"),
    ([{"role": "user", "content": 1}], "input.0.content"),
    ([{"type": "web_search_call", "id": "ws"}], "input.0.type"),
    ([{"type": "function_call", "name": "f"}], "input.0.call_id"),
    ([{"type": "function_call_output", "call_id": "a"}], "input.0.output"),
    ([{"type": "reasoning", "summary": [], "encrypted_content": 1}], "input.0.encrypted_content"),
    ([{"type": 1}], "input.0"),
    (["Hi"], "input.0"),
    (1, "input"),
    ([], "input"),
    ([{"role": "user", "content": ""}] * 8193, "input"),
]


@rows(("input_", "param"), NOT_READ)
def test_what_cannot_be_read_is_rejected_by_its_field(input_: Any, param: str) -> None:
    assert rejection(input_)[0] == param


def test_the_type_of_a_part_or_an_item_that_cannot_be_read_is_named() -> None:
    assert "'input_image'" in rejection([{"role": "user", "content": [{"type": "input_image"}]}])[1]
    assert "'mcp_call'" in rejection([{"type": "mcp_call"}])[1]


# Tools


def test_functions_custom_tools_and_namespaces_are_functions_of_the_model() -> None:
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}}
    grammar = {"type": "grammar", "syntax": "regex", "definition": "a+"}
    made = conversation(
        tools=[
            function("add", parameters=parameters, strict=True, description="Adds."),
            custom("say", format={"type": "text"}),
            custom("patch", format=grammar, description="Patches."),
            {
                "type": "namespace",
                "name": "agents",
                "description": "Agents.",
                "tools": [function("spawn", description="Spawns."), custom("send")],
            },
            {"type": "web_search", "filters": {"allowed_domains": ["a"]}},
            {"type": "image_generation", "output_format": "png"},
        ]
    )
    empty = {"type": "object", "properties": {}, "additionalProperties": False}

    def text(**fields: str) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"input": {"type": "string"} | fields},
            "required": ["input"],
            "additionalProperties": False,
        }

    followed = text(description="Follows this regex grammar:\na+")
    assert list(made.tools) == [
        ToolSpec("add", parameters, "Adds.", strict=True),
        ToolSpec("say", text(), freeform=FreeformInput()),
        ToolSpec("patch", followed, "Patches.", freeform=FreeformInput("regex", "a+")),
        ToolSpec("agents__spawn", empty, "Agents.\n\nSpawns."),
        ToolSpec("agents__send", text(), freeform=FreeformInput()),
    ]
    assert made.tool_choice == "auto"


def test_tools_can_join_among_the_items() -> None:
    more = [custom("say"), function("add", description="Later.")]
    items = [
        {"type": "additional_tools", "role": "developer", "tools": more},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "tool_search"}]},
        {"role": "assistant", "content": "Well"},
    ]
    made = conversation(
        items, tools=[function("add")], tool_choice={"type": "custom", "name": "say"}
    )
    assert [(tool.name, tool.description) for tool in made.tools] == [
        ("add", "Later."),
        ("say", None),
    ]
    assert [message.role for message in made.messages] == ["system", "user", "assistant"]
    assert rejection([{"type": "additional_tools", "tools": [{"type": "x"}]}])[0] == (
        "input.0.tools.0.type"
    )


def test_hosted_tools_alone_are_none_where_none_is_to_be_called() -> None:
    made = conversation(tools=[{"type": "web_search"}], tool_choice="none")
    assert (list(made.tools), made.tool_choice) == ([], "none")


@rows(
    ("choice", "expected"),
    [
        ("none", "none"),
        ("auto", "auto"),
        ("required", "required"),
        ({"type": "function", "name": "add"}, NamedTool("add")),
        ({"type": "custom", "name": "patch"}, NamedTool("patch")),
        ({"type": "function", "name": "f", "namespace": "n"}, NamedTool("n__f")),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [function("add"), custom("patch"), {"type": "web_search"}],
            },
            AllowedTools(frozenset({"add", "patch"}), "auto"),
        ),
    ],
)
def test_tool_choices(choice: Any, expected: Any) -> None:
    tools = [function("add"), custom("patch"), {"type": "web_search"}]
    tools.append({"type": "namespace", "name": "n", "tools": [function("f")]})
    assert conversation(tools=tools, tool_choice=choice).tool_choice == expected


ADD: Final = [function("add")]
SEARCH: Final = [{"type": "web_search"}]
REJECTED_TOOLS: Final[list[tuple[dict[str, Any], str, str]]] = [
    ({"tools": ADD, "tool_choice": {"type": "web_search"}}, "tool_choice.type", "'web_search'"),
    ({"tools": ADD, "tool_choice": {"type": "mcp"}}, "tool_choice.type", "'mcp'"),
    ({"tools": ADD, "tool_choice": {"type": "magic"}}, "tool_choice.type", "'magic'"),
    ({"tools": ADD, "tool_choice": "any"}, "tool_choice", ""),
    ({"tools": ADD, "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice", "'sub'"),
    ({"tools": SEARCH}, "tools", "'web_search' does not run on this server: pass a function"),
    ({"tools": SEARCH, "tool_choice": "required"}, "tools", "'web_search'"),
    ({"tools": [*ADD, {"type": "mcp"}]}, "tools.1.type", "'mcp' does not run on this server"),
    ({"tools": [{"type": "file_search"}]}, "tools.0.type", "there are no vector stores"),
    (
        {
            "tools": ADD,
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "code_interpreter"}],
            },
        },
        "tool_choice.tools.0.type",
        "'code_interpreter'",
    ),
    (
        {
            "tools": ADD,
            "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": SEARCH},
        },
        "tool_choice",
        "",
    ),
    (
        {
            "tools": ADD,
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [function("x")]},
        },
        "tool_choice",
        "'x'",
    ),
    ({"tools": [{"type": "magic"}]}, "tools.0.type", "'magic'"),
    ({"tools": [{"name": "f"}]}, "tools.0", ""),
    ({"tools": [function("a b")]}, "tools.0.name", ""),
    ({"tools": ADD * 2}, "tools", "same name"),
    (
        {
            "tools": [
                function("a__b"),
                {"type": "namespace", "name": "a", "tools": [function("b")]},
            ]
        },
        "tools",
        "same name",
    ),
    ({"tools": [{"type": "namespace", "name": "a", "tools": SEARCH}]}, "tools.0.tools.0.type", ""),
    (
        {"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "mcp"}]}]},
        "tools.0.tools.0.type",
        "let the client call it",
    ),
    (
        {
            "tools": [
                {"type": "namespace", "name": "a", "tools": [function(f"f{i}") for i in range(513)]}
            ]
        },
        "tools",
        "512",
    ),
    ({"tools": [function("f", description="x" * 600_000)]}, "tools", "characters"),
    ({"tools": [{"type": "shell", "x": float("nan")}]}, "tools.0", "NaN"),
    ({"tools": [{"type": "shell", "x": "\ud800"}]}, "tools.0", "surrogate"),
    ({"tools": [custom(format={"type": "grammar", "syntax": "bnf"})]}, "tools.0.format.syntax", ""),
    ({"tools": [custom(format={"type": "grammar"})]}, "tools.0.format.definition", ""),
]


@rows(("fields", "param", "text"), REJECTED_TOOLS)
def test_tools_that_cannot_be_are_rejected(fields: dict[str, Any], param: str, text: str) -> None:
    found, message = rejection(**fields)
    assert found == param
    assert text in message


# Other fields


@rows(
    ("fields", "param"),
    [
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"conversation": "c"}, "conversation"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 1}, "max_tokens"),
        ({"background": True, "store": False}, "background"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"include": ["everything"]}, "include.0"),
        ({"truncation": "middle"}, "truncation"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": {"schema": {}}}}, "text.format.schema"),
        ({"text": {"verbosity": "silent"}}, "text.verbosity"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
        ({"previous_response_id": ""}, "previous_response_id"),
        ({"stop": ["a"] * 33}, "stop"),
    ],
)
def test_what_is_rejected_names_its_field(fields: dict[str, Any], param: str) -> None:
    assert rejection(**fields)[0] == param


def test_what_asks_for_an_output_all_the_same_is_accepted() -> None:
    request(generate=True, prompt_cache_options={"prewarm": False, "mode": "explicit"})
    assert len(request(stop=[str(number) for number in range(32)]).stop) == 32


def test_formats_of_the_text() -> None:
    schema = {"type": "object", "properties": {}}
    asked = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    made = request(text={"format": asked}).text.format
    grammar = made.grammar()
    assert grammar is not None
    assert grammar.param == "text.format"
    assert made.echo() == asked | {"description": None}
    as_object = request(text={"format": {"type": "json_object"}}).text.format
    assert as_object.grammar() is not None
    assert as_object.echo() == {"type": "json_object"}
    assert request(text={"verbosity": "low"}).text.format.grammar() is None


def test_parameters_of_sampling_arrive() -> None:
    asked = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 7,
        "cache_salt": "s",
    }
    body = request(**asked, stop="x", max_output_tokens=5, service_tier="flex")
    params = body.to_generation_params()
    assert {name: getattr(params, name) for name in asked} == asked
    assert (params.stop, params.max_tokens, body.queue_priority) == (["x"], 5, Priority.LOW)
    assert params.logprobs is None
    asked_effort = conversation(reasoning={"effort": "none"}, chat_template_kwargs={"a": 1})
    assert asked_effort.reasoning_effort == "none"
    assert asked_effort.template_kwargs == {"a": 1}


def test_a_truncated_prompt_leaves_room_for_the_output() -> None:
    assert request().prompt_truncation() is None
    for fields, reserved in (({}, 256), ({"max_output_tokens": 5}, 5)):
        truncation = request(truncation="auto", **fields).prompt_truncation()
        assert truncation is not None
        assert truncation.num_reserved == reserved
