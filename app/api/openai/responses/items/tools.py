"""Tools and tool choice of a response: functions, custom tools, namespaces of both, hosted tools.

A model knows a tool in a namespace by one name, `namespace__tool`; its calls are named in two parts again.
Of hosted tools, which run at OpenAI, those are accepted that agents send beside functions of their own.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from app.api.openai.responses.items.hosted_tools import REFUSED, UNASKED, HostedTool, refuse
from app.api.openai.schemas.tool_calling.custom_tools import (
    ANY_TEXT,
    Definition,
    Syntax,
    custom_spec,
)
from app.api.openai.schemas.tool_calling.tool_choice import TOOL_CHOICE_MODES, ToolChoiceMode
from app.api.openai.schemas.tool_calling.tools import Function, Name
from app.api.schemas.base import RequestModel
from app.api.schemas.by_type import by_type
from app.api.schemas.fields import Text, field_error
from app.api.schemas.tools import check_tool_specs, check_tools_size
from app.parsing import tool_spec
from app.parsing.tool_spec import FreeformInput, ToolSpec

_MAX_TOOLS: Final = 512
_SEPARATOR: Final = "__"


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that a model may call; `spec.name` is the name that the model knows."""

    spec: ToolSpec
    name: str
    namespace: str | None = None

    @property
    def is_custom(self) -> bool:
        return self.spec.freeform is not None


def qualified_name(name: str, namespace: str | None) -> str:
    """Return the one name of a tool by which a model knows it."""
    return name if namespace is None else f"{namespace}{_SEPARATOR}{name}"


def _below(heading: str, description: str | None) -> str | None:
    return "\n\n".join(filter(None, (heading, description))) or None


class FunctionTool(Function):
    type: Literal["function"]

    def callable_tools(
        self, namespace: str | None = None, heading: str = ""
    ) -> Iterator[CallableTool]:
        name, description = qualified_name(self.name, namespace), _below(heading, self.description)
        spec = ToolSpec(name, self.full_parameters, description, self.strict)
        yield CallableTool(spec, self.name, namespace)


class CustomFormat(RequestModel):
    """The format of a custom tool's input; `text` is any text."""

    type: Literal["text", "grammar"]
    syntax: Syntax = "lark"
    definition: Definition = ""

    @model_validator(mode="after")
    def _check_grammar(self) -> Self:
        if self.type == "grammar" and not self.definition:
            raise field_error("the type grammar needs it", "definition")
        return self

    def to_freeform(self) -> FreeformInput:
        return FreeformInput(self.syntax, self.definition) if self.type == "grammar" else ANY_TEXT


class CustomTool(RequestModel):
    """A tool whose input is text; in the prompt it is a function of the one string `input`."""

    type: Literal["custom"]
    name: Name
    description: Text | None = None
    format: CustomFormat | None = None

    def callable_tools(
        self, namespace: str | None = None, heading: str = ""
    ) -> Iterator[CallableTool]:
        freeform = ANY_TEXT if self.format is None else self.format.to_freeform()
        name, description = qualified_name(self.name, namespace), _below(heading, self.description)
        yield CallableTool(custom_spec(name, description, freeform), self.name, namespace)


_CALLABLE: Final[dict[str, Callable[[Any], FunctionTool | CustomTool]]] = {
    "function": FunctionTool.model_validate,
    "custom": CustomTool.model_validate,
}
_REFUSED: Final = dict.fromkeys(REFUSED, refuse)
_NestedTool = Annotated[
    FunctionTool | CustomTool, BeforeValidator(by_type({**_REFUSED, **_CALLABLE}))
]


class NamespaceTool(RequestModel):
    """Tools that belong together; the first one's description begins with the one they share."""

    type: Literal["namespace"]
    name: Name
    description: Text = ""
    tools: list[_NestedTool]

    def callable_tools(self) -> Iterator[CallableTool]:
        texts = [self.description, *[""] * len(self.tools)]
        for tool, text in zip(self.tools, texts, strict=False):
            yield from tool.callable_tools(self.name, text)


AnyTool = FunctionTool | CustomTool | NamespaceTool | HostedTool

_KINDS: Final[dict[str, Callable[[Any], AnyTool]]] = {
    **_REFUSED,
    **dict.fromkeys(UNASKED, HostedTool.model_validate),
    **_CALLABLE,
    "namespace": NamespaceTool.model_validate,
}


def _check_tools(tools: list[AnyTool]) -> list[AnyTool]:
    specs = [each.spec for each in callable_tools(tools)]
    if len(specs) > _MAX_TOOLS:
        raise field_error(f"there are {len(specs)} tools, and {_MAX_TOOLS} are the most")
    check_tool_specs(specs)
    return tools


def callable_tools(tools: Sequence[AnyTool]) -> Iterator[CallableTool]:
    return chain.from_iterable(tool.callable_tools() for tool in tools)


ToolList = Annotated[
    list[Annotated[AnyTool, BeforeValidator(by_type(_KINDS))]],
    Field(max_length=_MAX_TOOLS),
    BeforeValidator(
        check_tools_size,
        json_schema_input_type=Annotated[list[AnyTool], Field(max_length=_MAX_TOOLS)],
    ),
    AfterValidator(_check_tools),
]


class NamedChoice(RequestModel):
    """The one tool that has to be called, or one of several that may be."""

    type: Literal["function", "custom"]
    name: Text
    namespace: Text | None = None

    @property
    def qualified_name(self) -> str:
        return qualified_name(self.name, self.namespace)


_ALLOWED: Final[dict[str, Callable[[Any], NamedChoice | HostedTool]]] = {
    **_REFUSED,
    **dict.fromkeys(UNASKED, HostedTool.model_validate),
    **dict.fromkeys(("function", "custom"), NamedChoice.model_validate),
}


class AllowedChoice(RequestModel):
    """The tools of the request that may be called; hosted ones among them never are."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[Annotated[NamedChoice | HostedTool, BeforeValidator(by_type(_ALLOWED))]] = Field(
        max_length=_MAX_TOOLS
    )

    @property
    def names(self) -> list[str]:
        return [tool.qualified_name for tool in self.tools if isinstance(tool, NamedChoice)]


_CHOICES: Final[dict[str, Callable[[Any], NamedChoice | AllowedChoice]]] = {
    **dict.fromkeys((*REFUSED, *UNASKED), refuse),
    "function": NamedChoice.model_validate,
    "custom": NamedChoice.model_validate,
    "allowed_tools": AllowedChoice.model_validate,
}
_parse_choice: Final = by_type(_CHOICES)


def _choice(data: Any) -> Any:
    return data if data in TOOL_CHOICE_MODES else _parse_choice(data)


ToolChoice = Annotated[ToolChoiceMode | NamedChoice | AllowedChoice, BeforeValidator(_choice)]


def check_tools(tools: Sequence[AnyTool], names: Collection[str], choice: ToolChoice) -> None:
    """Check the tools of a request and the choice, beside the names of all tools that can be called.

    Raises:
        PydanticCustomError: no tool fulfils the choice, or those of the request are hosted and the only ones.
    """
    hosted = [tool for tool in tools if isinstance(tool, HostedTool)]
    if hosted and not names and choice != "none":
        # They were asked for.
        refuse({"type": hosted[0].type}, "tools")
    chosen = [choice.qualified_name] if isinstance(choice, NamedChoice) else []
    chosen += choice.names if isinstance(choice, AllowedChoice) else []
    for name in chosen:
        if name not in names:
            raise field_error(f"there is no tool named {name[:80]!r}", "tool_choice")
    must_call = choice == "required" or getattr(choice, "mode", "") == "required"
    if must_call and not (chosen if isinstance(choice, AllowedChoice) else names):
        raise field_error("'required' needs a tool that can be called here", "tool_choice")


def to_tool_choice(choice: ToolChoice) -> tool_spec.ToolChoice:
    if isinstance(choice, NamedChoice):
        return tool_spec.NamedTool(choice.qualified_name)
    if isinstance(choice, AllowedChoice):
        return tool_spec.AllowedTools(frozenset(choice.names), choice.mode)
    return choice
