"""Tools that a model may call, independent of the API."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class FreeformInput:
    """The input of a tool that takes text instead of JSON (OpenAI's custom tools).

    syntax: the syntax of the definition that the text must follow; None allows any text.
    """

    syntax: Literal["lark", "regex"] | None = None
    definition: str = ""


def freeform_parameters(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of the arguments of a tool that takes text, from that of the text."""
    return {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function that the model may call.

    parameters: the JSON Schema of its arguments, of type `object`.
    strict: whether the arguments are enforced to follow the schema.
    freeform: the rules of a tool that takes text, whose only parameter is the string `input`; else None.
    deferred: the template does not describe the tool; the conversation does where it refers to it.
    """

    name: str
    parameters: Mapping[str, Any]
    description: str | None = None
    strict: bool = False
    freeform: FreeformInput | None = None
    deferred: bool = False

    def template_fields(self) -> dict[str, Any]:
        """Return what chat templates and mlx-lm's parsers take: OpenAI's form of a tool."""
        fields: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            fields["description"] = self.description
        fields["parameters"] = self.parameters
        return {"type": "function", "function": fields}


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The one tool that must be called."""

    name: str


@dataclass(frozen=True, slots=True)
class AllowedTools:
    """Only these tools may be called, although the prompt describes all; `required`: one must be called."""

    names: frozenset[str]
    mode: Literal["auto", "required"]


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


def must_call(choice: ToolChoice) -> bool:
    """Return whether a tool choice requires a call."""
    match choice:
        case NamedTool():
            return True
        case AllowedTools(_, mode):
            return mode == "required"
        case _:
            return choice == "required"


def callable_tools(tools: Sequence[ToolSpec], choice: ToolChoice) -> Sequence[ToolSpec]:
    """Return the tools that may be called under a tool choice."""
    match choice:
        case NamedTool(name):
            return [tool for tool in tools if tool.name == name]
        case AllowedTools(names, _):
            return [tool for tool in tools if tool.name in names]
        case _:
            return tools
