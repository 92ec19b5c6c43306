"""Tools that a model may call, independent of the API."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function.

    parameters: the JSON Schema of its arguments, of type `object`.
    strict: the arguments have to follow the schema.
    """

    name: str
    parameters: Mapping[str, Any]
    description: str | None = None
    strict: bool = False

    def template_fields(self) -> dict[str, Any]:
        """Return what chat templates and mlx-lm's parsers take: OpenAI's form of a tool."""
        fields: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            fields["description"] = self.description
        fields["parameters"] = self.parameters
        return {"type": "function", "function": fields}


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The one tool that has to be called."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedTool
