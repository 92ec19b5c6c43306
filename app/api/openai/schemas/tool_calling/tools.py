"""Tools and tool calls of a chat request."""

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from app.api.openai.schemas.tool_calling.custom_tools import (
    ANY_TEXT,
    Definition,
    Syntax,
    custom_arguments,
    custom_spec,
)
from app.api.schemas.base import RequestModel
from app.api.schemas.by_type import by_type
from app.api.schemas.fields import GivenName, Text, field_error
from app.api.schemas.tools import Parameters, check_tool_specs, check_tools_size, full_parameters
from app.parsing.tool_spec import FreeformInput, ToolSpec
from app.prompts import conversation

MAX_TOOLS: Final = 128

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(RequestModel):
    """`parameters` is the JSON Schema of the arguments; `strict` asks for it to be enforced."""

    name: Name
    description: Text | None = None
    parameters: Parameters = Field(default_factory=dict)
    strict: bool = False

    @property
    def full_parameters(self) -> dict[str, Any]:
        return full_parameters(self.parameters)


class Tool(RequestModel):
    type: Literal["function"]
    function: Function

    def to_spec(self) -> ToolSpec:
        function = self.function
        return ToolSpec(
            function.name, function.full_parameters, function.description, function.strict
        )


class Grammar(RequestModel):
    syntax: Syntax
    definition: Annotated[Definition, Field(min_length=1)]


class CustomFormat(RequestModel):
    """The format of the input; `text` is any text."""

    type: Literal["text", "grammar"]
    grammar: Grammar | None = None

    @model_validator(mode="after")
    def _check_grammar(self) -> Self:
        if (self.grammar is not None) != (self.type == "grammar"):
            relation = "it is missing beside" if self.grammar is None else "this needs"
            raise field_error(f"{relation} the type grammar", "grammar")
        return self

    def to_freeform(self) -> FreeformInput:
        if self.grammar is None:
            return ANY_TEXT
        return FreeformInput(self.grammar.syntax, self.grammar.definition)


class Custom(RequestModel):
    name: Name
    description: Text | None = None
    format: CustomFormat = CustomFormat(type="text")


class CustomTool(RequestModel):
    """A tool whose input is text."""

    type: Literal["custom"]
    custom: Custom

    def to_spec(self) -> ToolSpec:
        custom = self.custom
        return custom_spec(custom.name, custom.description, custom.format.to_freeform())


AnyTool = Tool | CustomTool

_TOOLS: Final[dict[str, Callable[[Any], AnyTool]]] = {
    "function": Tool.model_validate,
    "custom": CustomTool.model_validate,
}


def _check_tools(tools: list[AnyTool]) -> list[AnyTool]:
    check_tool_specs(tool.to_spec() for tool in tools)
    return tools


ToolList = Annotated[
    list[Annotated[AnyTool, BeforeValidator(by_type(_TOOLS))]],
    Field(max_length=MAX_TOOLS),
    BeforeValidator(
        check_tools_size,
        json_schema_input_type=Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)],
    ),
    AfterValidator(_check_tools),
]


def custom_names(tools: Iterable[AnyTool]) -> frozenset[str]:
    """Return the names of the tools that take text."""
    return frozenset(tool.custom.name for tool in tools if isinstance(tool, CustomTool))


class CalledFunction(RequestModel):
    """A function that a model called before; `arguments` should be the text of a JSON object."""

    name: GivenName
    arguments: Text = ""


class ToolCall(RequestModel):
    id: GivenName
    type: Literal["function"] = "function"
    function: CalledFunction

    def to_call(self) -> conversation.ToolCall:
        return conversation.ToolCall(self.id, self.function.name, self.function.arguments)


class CalledCustom(RequestModel):
    name: GivenName
    input: Text = ""


class CustomToolCall(RequestModel):
    id: GivenName
    type: Literal["custom"]
    custom: CalledCustom

    def to_call(self) -> conversation.ToolCall:
        arguments = custom_arguments(self.custom.input)
        return conversation.ToolCall(self.id, self.custom.name, arguments)


_CALLS: Final[dict[str, Callable[[Any], ToolCall | CustomToolCall]]] = {
    "function": ToolCall.model_validate,
    "custom": CustomToolCall.model_validate,
}
_parse_call: Final = by_type(_CALLS)


def _call(data: Any) -> ToolCall | CustomToolCall:
    """Return the call of an object; one without a type is a function's."""
    if isinstance(data, dict) and data.get("type") is None:
        data = data | {"type": "function"}
    return _parse_call(data)


AnyToolCall = Annotated[ToolCall | CustomToolCall, BeforeValidator(_call)]
