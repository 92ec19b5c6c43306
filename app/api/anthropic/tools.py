"""The tools of a request, and which of them have to be called."""

from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from app.api.anthropic.cache_control import CacheableBlock
from app.api.schemas.base import RequestModel
from app.api.schemas.fields import Text, field_error
from app.api.schemas.tools import Parameters, check_tool_specs, check_tools_size, full_parameters
from app.parsing import tool_spec
from app.parsing.tool_spec import ToolSpec

_MAX_TOOLS: Final = 512

_Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
_Kind = Annotated[Text, Field(max_length=128)]


class CustomTool(CacheableBlock):
    """A tool of the client.

    With `defer_loading` the prompt describes it where a `tool_reference` names it.
    """

    type: Literal["custom"] = "custom"
    name: _Name
    description: Text | None = None
    input_schema: Parameters
    strict: bool = False
    defer_loading: bool = False

    def to_spec(self) -> ToolSpec:
        return ToolSpec(
            self.name,
            full_parameters(self.input_schema),
            self.description,
            self.strict,
            deferred=self.defer_loading,
        )


class ServerTool(CacheableBlock):
    """A tool that Anthropic's models know or its servers run: not part of the prompt here."""

    type: _Kind
    name: _Kind | None = None


def _tag(tool: Any) -> str | None:
    if isinstance(tool, dict):
        return "custom" if tool.get("type") in (None, "custom") else "server"
    return None


_Tool = Annotated[
    Annotated[CustomTool, Tag("custom")] | Annotated[ServerTool, Tag("server")],
    Discriminator(
        _tag, custom_error_type="invalid", custom_error_message="a tool must be an object"
    ),
]


def tool_specs(tools: Iterable[CustomTool | ServerTool]) -> list[ToolSpec]:
    """Return the client's own tools."""
    return [tool.to_spec() for tool in tools if isinstance(tool, CustomTool)]


def _check_tools(tools: list[CustomTool | ServerTool]) -> list[CustomTool | ServerTool]:
    check_tool_specs(tool_specs(tools))
    return tools


_Tools = Annotated[list[_Tool], Field(max_length=_MAX_TOOLS)]
ToolList = Annotated[
    _Tools,
    BeforeValidator(check_tools_size, json_schema_input_type=_Tools),
    AfterValidator(_check_tools),
]


class ToolChoice(RequestModel):
    """`any` and `tool` are enforced."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if self.type == "tool" and self.name is None:
            raise field_error("the type 'tool' needs it", "name")
        return self

    def to_choice(self) -> tool_spec.ToolChoice:
        match self.type:
            case "tool":
                return tool_spec.NamedTool(self.name or "")
            case "any":
                return "required"
            case kind:
                return kind

    def check(self, tools: list[CustomTool | ServerTool]) -> None:
        """Raise PydanticCustomError for a choice that cannot be enforced with these tools."""
        names = {tool.name for tool in tools if isinstance(tool, CustomTool)}
        if self.type == "any" and not names:
            raise field_error("'any' needs tools with an input_schema", "tool_choice")
        if self.type != "tool" or self.name in names:
            return
        if any(self.name in (tool.name, tool.type) for tool in tools):
            message = f"the server tool {self.name!r} is not supported"
        else:
            message = f"there is no tool named {str(self.name)[:128]!r}"
        raise field_error(message, "tool_choice")
