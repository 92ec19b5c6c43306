"""Checks of the tools that clients define, in any API."""

import json
from collections.abc import Iterable
from itertools import accumulate
from typing import Annotated, Any, Final

from pydantic import AfterValidator

from app.api.schemas.fields import check_size, field_error, json_text
from app.api.schemas.json_schema import well_formed
from app.parsing.tool_spec import ToolSpec

# Together they become part of the prompt; many models' whole context is shorter.
_MAX_CHARACTERS: Final = 512 * 1024
# Templates walk through parameters recursively.
_MAX_DEPTH: Final = 64
# JSON that is read at all is not as deep.
_ANY_DEPTH: Final = 1000


def _check_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    json_text(schema, max_depth=_MAX_DEPTH, max_characters=_MAX_CHARACTERS)
    formed = well_formed(schema)
    if formed.get("type", "object") != "object":
        raise field_error("it must be the schema of an object")
    return formed


# The JSON Schema of a tool's arguments.
Parameters = Annotated[dict[str, Any], AfterValidator(_check_parameters)]


def full_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return parameters with their type; a tool without any takes an empty object."""
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", "properties": {}} | parameters


def check_tools_size(tools: Any) -> Any:
    """Reject what is too much for one prompt before each tool is looked at."""
    check_size(tools, max_depth=_ANY_DEPTH, max_values=_MAX_CHARACTERS // 2)
    return tools


def check_tool_specs(tools: Iterable[ToolSpec]) -> None:
    """Reject two tools of one name, and more text than one prompt should have."""
    specs = list(tools)
    if len({spec.name for spec in specs}) < len(specs):
        raise field_error("two tools have the same name")
    lengths = accumulate(len(json.dumps(spec.template_fields())) for spec in specs)
    if any(length > _MAX_CHARACTERS for length in lengths):
        raise field_error(f"together they are longer than {_MAX_CHARACTERS} characters")
