"""Which tools a model may call, or has to."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from app.api.openai.schemas.tool_calling.tools import MAX_TOOLS, AnyTool, Name
from app.api.schemas.base import RequestModel
from app.api.schemas.by_type import by_type
from app.api.schemas.fields import field_error
from app.parsing import tool_spec

ToolChoiceMode = Literal["none", "auto", "required"]
TOOL_CHOICE_MODES: Final = get_args(ToolChoiceMode)


class ToolName(RequestModel):
    name: Name


class NamedFunction(RequestModel):
    type: Literal["function"]
    function: ToolName

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustom(RequestModel):
    type: Literal["custom"]
    custom: ToolName

    @property
    def name(self) -> str:
        return self.custom.name


_NAMED: Final[dict[str, Callable[[Any], NamedFunction | NamedCustom]]] = {
    "function": NamedFunction.model_validate,
    "custom": NamedCustom.model_validate,
}
_Named = Annotated[NamedFunction | NamedCustom, BeforeValidator(by_type(_NAMED))]


class AllowedTools(RequestModel):
    """All tools are described, and these may be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[_Named], Field(min_length=1, max_length=MAX_TOOLS)]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools)


class AllowedToolsChoice(RequestModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ToolChoiceObject(RequestModel):
    """A choice of any kind: a union would report errors of all its members."""

    type: Literal["none", "auto", "required", "function", "custom", "allowed_tools"]
    function: ToolName | None = None
    custom: ToolName | None = None
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        for name in ("function", "custom", "allowed_tools"):
            is_given = getattr(self, name) is not None
            if is_given != (self.type == name):
                relation = "this needs" if is_given else "it is missing beside"
                raise field_error(f"{relation} the type {name}", name)
        return self

    def check(self, tools: Sequence[AnyTool]) -> None:
        """Raise PydanticCustomError for a choice of a tool that is not in the list."""
        known = {tool.to_spec().name for tool in tools}
        if self.type == "required" and not known:
            raise field_error("'required' needs tools", "tool_choice")
        for name in sorted(self._names - known):
            raise field_error(f"there is no tool named {name!r}", "tool_choice")

    def to_choice(self) -> tool_spec.ToolChoice:
        match self.type:
            case "function" | "custom":
                (name,) = self._names
                return tool_spec.NamedTool(name)
            case "allowed_tools":
                assert self.allowed_tools is not None
                return tool_spec.AllowedTools(self._names, self.allowed_tools.mode)
            case word:
                return word

    @property
    def _names(self) -> frozenset[str]:
        if self.allowed_tools is not None:
            return self.allowed_tools.names
        named = self.function or self.custom
        return frozenset() if named is None else frozenset({named.name})


def _as_object(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value not in TOOL_CHOICE_MODES:
        raise field_error("it must be 'none', 'auto', 'required' or an object")
    return {"type": value}


ToolChoice = Annotated[
    ToolChoiceObject,
    BeforeValidator(
        _as_object,
        json_schema_input_type=ToolChoiceMode | NamedFunction | NamedCustom | AllowedToolsChoice,
    ),
]
