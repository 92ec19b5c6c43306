"""What clients may say of tools, of calling them, and of calls that were made."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from app.api.openai.chat.messages import MessageParam
from app.api.openai.schemas.tool_calling.tool_choice import ToolChoice, ToolChoiceObject
from app.api.openai.schemas.tool_calling.tools import AnyTool, CustomToolCall, Tool, ToolList
from app.parsing.tool_spec import AllowedTools, NamedTool
from tests.support.rows import rows

tool_lists: TypeAdapter[list[AnyTool]] = TypeAdapter(ToolList)
tool_choices: TypeAdapter[ToolChoiceObject] = TypeAdapter(ToolChoice)


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | function}


def custom(**fields: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": "f"} | fields}


def function_of(given: Any) -> Tool:
    (parsed,) = tool_lists.validate_python([given])
    assert isinstance(parsed, Tool)
    return parsed


def fault(adapter: TypeAdapter[Any] | type[MessageParam], value: Any) -> tuple[str, str]:
    """Return where the first fault is, and its message."""
    validate = (
        adapter.validate_python if isinstance(adapter, TypeAdapter) else adapter.model_validate
    )
    with pytest.raises(ValidationError) as caught:
        validate(value)
    error = caught.value.errors()[0]
    where = [*map(str, error["loc"]), error.get("ctx", {}).get("param")]
    return ".".join(part for part in where if part is not None), error["msg"]


def nested_lists(depth: int) -> list[Any]:
    lists: list[Any] = []
    for _ in range(depth - 1):
        lists = [lists]
    return lists


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


def test_a_tool_is_passed_to_the_template_as_openai_writes_it() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    given = tool(description="Does it.", parameters=parameters, strict=True)
    parsed = function_of(given)
    assert parsed.function.strict
    function = {"name": "f", "description": "Does it.", "parameters": parameters}
    assert parsed.to_spec().template_fields() == {"type": "function", "function": function}


@rows(
    ("parameters", "schema"),
    [
        (None, {"type": "object", "properties": {}, "additionalProperties": False}),
        ({}, {"type": "object", "properties": {}, "additionalProperties": False}),
        ({"type": "object"}, {"type": "object", "properties": {}}),
        ({"properties": {"a": {}}}, {"type": "object", "properties": {"a": {}}}),
    ],
)
def test_what_is_left_out_of_parameters(parameters: Any, schema: dict[str, Any]) -> None:
    (parsed,) = tool_lists.validate_python([tool(parameters=parameters)])
    assert parsed.to_spec().template_fields()["function"] == {"name": "f", "parameters": schema}


def parameter(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}}


@rows(
    "keyword",
    ["properties", "required", "$defs", "definitions", "type", "anyOf", "enum", "items", "pattern"],
)
def test_a_keyword_that_is_null_is_left_out(keyword: str) -> None:
    for outer, inner in [({keyword: None}, {}), (parameter({keyword: None}), parameter({}))]:
        assert function_of(tool(parameters=outer)).function.parameters == inner


def test_values_that_are_null_stay() -> None:
    schema = parameter({"default": None, "const": None, "enum": [None], "anyOf": [True, {}]})
    assert function_of(tool(parameters=schema)).function.parameters == schema


def test_a_whole_number_may_be_written_as_another() -> None:
    schema = parameter({"type": "array", "minItems": 0.0, "maxItems": 3.0})
    found = function_of(tool(parameters=schema)).function.parameters["properties"]["a"]
    assert [str(found[name]) for name in ("minItems", "maxItems")] == ["0", "3"]


@rows(
    ("schema", "message"),
    [
        (parameter({"maxItems": 0.5}), "properties.a.maxItems must be a whole number"),
        ({"properties": []}, "properties must be an object"),
        ({"required": True}, "required must be an array of strings"),
        ({"required": [1]}, "required must be an array of strings"),
        ({"$defs": {"b": {"type": {}}}}, "$defs.b.type must be a string or an array of strings"),
        (parameter({"required": True}), "properties.a.required must be an array of strings"),
        (parameter({"anyOf": {}}), "properties.a.anyOf must be an array"),
        (parameter({"anyOf": [{}, {"enum": "b"}]}), "properties.a.anyOf.1.enum must be an array"),
        (parameter({"items": {"minItems": "1"}}), "properties.a.items.minItems must be a whole"),
        (parameter({"maxItems": -1}), "properties.a.maxItems must be a whole number of at least 0"),
    ],
)
def test_a_keyword_of_another_type_is_named(schema: dict[str, Any], message: str) -> None:
    where, reported = fault(tool_lists, [tool(parameters=schema)])
    assert where == "0.function.parameters"
    assert reported.startswith(message)


@rows(
    "tools",
    [
        [tool(name="a" * 64), tool(name="A_9-z", strict=None, description=None)],
        [tool(name=f"f{index}") for index in range(128)],
        [tool(parameters=nested(65))],
        [tool(unheard_of=1) | {"also": "unheard of"}],
        [custom(), tool(name="g"), custom(name="h", description="Does it.", format=None)],
        [custom(format={"type": "text"})],
    ],
)
def test_tools_that_are_accepted(tools: Any) -> None:
    assert len(tool_lists.validate_python(tools)) == len(tools)


@rows(
    ("tools", "where", "message"),
    [
        ([tool(name=f"f{i}") for i in range(129)], "", "List should have at most 128 items"),
        ([{"type": "web_search"}], "0.type", "the type 'web_search' is not supported"),
        ([{"type": "custom"}], "0.custom", "Field required"),
        ([{"type": "custom", "custom": {}}], "0.custom.name", "Field required"),
        ([custom(), tool()], "", "two tools have the same name"),
        ([custom(format={"type": "json"})], "0.custom.format.type", "Input should be 'text' or"),
        ([custom(format={"type": "grammar"})], "0.custom.format.grammar", "it is missing beside"),
        (
            [custom(format={"type": "grammar", "grammar": {"syntax": "lark"}})],
            "0.custom.format.grammar.definition",
            "Field required",
        ),
        (
            [custom(format={"type": "text", "grammar": {"syntax": "regex", "definition": "a"}})],
            "0.custom.format.grammar",
            "this needs the type grammar",
        ),
        ([{"type": "function"}], "0.function", "Field required"),
        ([{"function": {"name": "f"}}], "0", "it must be an object with a type"),
        ([tool(name="")], "0.function.name", "String should match"),
        ([tool(name="a" * 65)], "0.function.name", "String should match"),
        ([tool(name="a.b")], "0.function.name", "String should match"),
        ([tool(name="a\n")], "0.function.name", "String should match"),
        ([tool(), tool()], "", "two tools have the same name"),
        ([tool(strict=1)], "0.function.strict", "Input should be a valid boolean"),
        ([tool(description=1)], "0.function.description", "Input should be a valid string"),
        ([tool(parameters=[])], "0.function.parameters", "Input should be a valid dictionary"),
        ([tool(parameters={"type": "array"})], "0.function.parameters", "it must be the schema of"),
        ([tool(parameters={"a": float("nan")})], "0.function.parameters", "it contains NaN or"),
        ([tool(parameters={"a": "\ud800"})], "0.function.parameters", "it contains half of a"),
        ([tool(parameters={"\ud800": 1})], "0.function.parameters", "it contains half of a"),
        ([tool(parameters=nested(66))], "0.function.parameters", "it is nested deeper than 64"),
        ([tool(parameters={"a": nested_lists(65)})], "0.function.parameters", "it is nested"),
        ([tool(description="x" * 2**19)], "", "together they are longer than 524288 characters"),
        ([tool(parameters={"a": [1] * 200_000})] * 2, "", "it has more than 262144 values"),
    ],
)
def test_tools_that_are_rejected(tools: Any, where: str, message: str) -> None:
    reported = fault(tool_lists, tools)
    assert reported[0] == where
    assert reported[1].startswith(message)


@rows("choice", ["none", "auto", "required"])
def test_a_word_is_a_choice(choice: str) -> None:
    assert tool_choices.validate_python(choice).to_choice() == choice
    assert tool_choices.validate_python({"type": choice}).to_choice() == choice


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    tools = [tool(name=name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_tools_are_chosen_by_name() -> None:
    assert tool_choices.validate_python(tool()).to_choice() == NamedTool("f")
    assert tool_choices.validate_python(custom()).to_choice() == NamedTool("f")
    chosen = tool_choices.validate_python(allowed("f", "g", mode="required")).to_choice()
    assert chosen == AllowedTools(frozenset({"f", "g"}), "required")
    some = {"mode": "auto", "tools": [custom(name="h"), tool()]}
    both = tool_choices.validate_python({"type": "allowed_tools", "allowed_tools": some})
    assert both.to_choice() == AllowedTools(frozenset({"f", "h"}), "auto")


@rows(
    ("choice", "where"),
    [
        ("any", ""),
        ("", ""),
        (1, ""),
        ({"name": "f"}, "type"),
        ({"type": "web_search"}, "type"),
        ({"type": "custom"}, "custom"),
        (custom() | tool(), "custom"),
        ({"type": "function"}, "function"),
        ({"type": "function", "function": {}}, "function.name"),
        ({"type": "auto", "function": {"name": "f"}}, "function"),
        ({"type": "allowed_tools"}, "allowed_tools"),
        (allowed("f", mode="none"), "allowed_tools.mode"),
        (allowed(), "allowed_tools.tools"),
        (allowed("a b"), "allowed_tools.tools.0.function.name"),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [custom(name="")]},
            },
            "allowed_tools.tools.0.custom.name",
        ),
        (tool() | allowed("f"), "function"),
    ],
)
def test_a_choice_that_cannot_be_read_is_pointed_at(choice: Any, where: str) -> None:
    assert fault(tool_choices, choice)[0] == where


@rows(
    ("names", "choice", "message"),
    [
        ([], "none", None),
        ([], "auto", None),
        (["f"], "required", None),
        (["f"], tool(), None),
        (["f", "g"], allowed("g"), None),
        ([], "required", "'required' needs tools"),
        (["g"], tool(), "there is no tool named 'f'"),
        (["g"], allowed("g", "h"), "there is no tool named 'h'"),
    ],
)
def test_a_choice_is_of_the_tools_that_are_there(
    names: list[str], choice: Any, message: str | None
) -> None:
    tools = [Tool.model_validate(tool(name=name)) for name in names]
    if message is None:
        tool_choices.validate_python(choice).check(tools)
        return
    with pytest.raises(PydanticCustomError) as caught:
        tool_choices.validate_python(choice).check(tools)
    assert caught.value.message() == message
    assert caught.value.context == {"message": message, "param": "tool_choice"}


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@rows(
    ("message", "content", "reasoning"),
    [
        ({"role": "assistant", "tool_calls": [CALL]}, "", None),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, "", None),
        ({"role": "assistant", "content": "Hm.", "tool_calls": [CALL]}, "Hm.", None),
        ({"role": "assistant", "content": None}, "", None),
        ({"role": "assistant", "content": "A", "reasoning": "r"}, "A", "r"),
        ({"role": "assistant", "content": "A", "reasoning_content": "c"}, "A", "c"),
        (
            {"role": "assistant", "content": "A", "reasoning_content": "c", "reasoning": "r"},
            "A",
            "c",
        ),
        (
            {"role": "assistant", "content": "A", "reasoning_content": None, "reasoning": "r"},
            "A",
            "r",
        ),
        ({"role": "assistant", "content": None, "refusal": "No."}, "No.", None),
        ({"role": "assistant", "refusal": "No."}, "No.", None),
        ({"role": "assistant", "content": "A", "refusal": None}, "A", None),
        (
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "A"}, {"type": "refusal", "refusal": "No."}],
            },
            "A\nNo.",
            None,
        ),
        ({"role": "documents", "content": "D"}, "D", None),
        ({"role": "user", "content": "Q", "tool_calls": []}, "Q", None),
        ({"role": "user", "content": "Q", "tool_calls": None}, "Q", None),
        ({"role": "tool", "tool_call_id": "c", "content": "4"}, "4", None),
        (
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "4"}]},
            "4",
            None,
        ),
    ],
)
def test_turns_that_are_accepted(message: Any, content: str, reasoning: str | None) -> None:
    turn = MessageParam.model_validate(message)
    assert turn.content == content
    assert turn.reasoning_content == reasoning
    assert [call.to_call().name for call in turn.tool_calls] == ["f"] * len(turn.tool_calls)


def test_the_call_of_a_tool_that_takes_text_has_the_text_as_its_argument() -> None:
    made = {"id": "c", "type": "custom", "custom": {"name": "f", "input": 'é"\n'}}
    turn = MessageParam.model_validate({"role": "assistant", "tool_calls": [made, CALL]})
    assert isinstance(turn.tool_calls[0], CustomToolCall)
    written, plain = turn.to_message().tool_calls
    assert (written.id, written.name, written.arguments) == ("c", "f", '{"input": "é\\"\\n"}')
    assert plain.arguments == "{}"


@pytest.mark.parametrize("kind", [None, ...])
def test_a_call_without_a_type_is_a_functions(kind: object) -> None:
    call = {"id": "c", "function": {"name": "f"}} | ({} if kind is ... else {"type": kind})
    turn = MessageParam.model_validate({"role": "assistant", "tool_calls": [call]})
    assert turn.to_message().tool_calls[0].name == "f"


@rows(
    ("message", "where", "text"),
    [
        ({"role": "function", "content": "4"}, "", "this role is called 'tool' now"),
        ({"role": "assistant"}, "content", "Field required"),
        ({"role": "assistant", "tool_calls": []}, "content", "Field required"),
        ({"role": "tool", "content": "4"}, "tool_call_id", "a tool's result needs the id"),
        ({"role": "tool", "tool_call_id": "c"}, "content", "Field required"),
        (
            {"role": "user", "content": "", "tool_calls": [CALL]},
            "tool_calls",
            "only an assistant calls tools",
        ),
        (
            {"role": "assistant", "function_call": {"name": "f"}, "content": ""},
            "function_call",
            "this is not supported",
        ),
        (
            {"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]},
            "tool_calls.0.custom",
            "Field required",
        ),
        (
            {"role": "assistant", "tool_calls": [CALL | {"type": "mcp"}]},
            "tool_calls.0.type",
            "the type 'mcp' is not supported",
        ),
        (
            {"role": "assistant", "tool_calls": ["f"]},
            "tool_calls.0",
            "it must be an object with a type",
        ),
        (
            {"role": "assistant", "tool_calls": [CALL | {"id": ""}]},
            "tool_calls.0.id",
            "String should have at least 1",
        ),
        (
            {
                "role": "assistant",
                "tool_calls": [CALL | {"function": {"name": "f", "arguments": {}}}],
            },
            "tool_calls.0.function.arguments",
            "Input should be a valid string",
        ),
        (
            {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "\ud800"}}]},
            "tool_calls.0.function.name",
            "Input should be a valid string",
        ),
    ],
)
def test_turns_that_are_rejected(message: Any, where: str, text: str) -> None:
    assert fault(MessageParam, message)[0] == where
    assert fault(MessageParam, message)[1].startswith(text)
