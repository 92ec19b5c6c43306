"""Tools that take text instead of JSON, which OpenAI calls custom.

A model knows such a tool as a function of the one string `input`.
"""

import json
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from app.api.schemas.fields import Text
from app.parsing.tool_spec import FreeformInput, ToolSpec, freeform_parameters

_MAX_DEFINITION: Final = 64 * 1024

ANY_TEXT: Final = FreeformInput()

Syntax = Literal["lark", "regex"]
Definition = Annotated[Text, Field(max_length=_MAX_DEFINITION)]


def custom_spec(name: str, description: str | None, freeform: FreeformInput) -> ToolSpec:
    """Return the function that a custom tool is in the prompt."""
    text: dict[str, Any] = {"type": "string"}
    if freeform.syntax is not None:
        text["description"] = f"Follows this {freeform.syntax} grammar:\n{freeform.definition}"
    return ToolSpec(name, freeform_parameters(text), description, freeform=freeform)


def custom_arguments(text: str) -> str:
    """Return the arguments of a call with this input, as the model writes them."""
    return json.dumps({"input": text}, ensure_ascii=False)
