"""The content blocks of a conversation that a client sends."""

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, FailFast, Field

from app.api.schemas.base import RequestModel
from app.api.schemas.fields import GivenName, Text, field_error, json_text

# Templates walk through arguments recursively.
_MAX_DEPTH: Final = 64
# Agents write whole files with one call.
_MAX_CHARACTERS: Final = 4 << 20


def _check_input(value: dict[str, Any]) -> dict[str, Any]:
    json_text(value, max_depth=_MAX_DEPTH, max_characters=_MAX_CHARACTERS)
    return value


class TextParam(RequestModel):
    type: Literal["text"]
    text: Text


class ThinkingParam(RequestModel):
    """`signature` seals the text, which is empty if the client did not get it."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text


class RedactedThinkingParam(RequestModel):
    type: Literal["redacted_thinking"]
    data: Text


class ToolUseParam(RequestModel):
    type: Literal["tool_use"]
    id: GivenName
    name: GivenName
    input: Annotated[dict[str, Any], AfterValidator(_check_input)]


class ToolReferenceParam(RequestModel):
    """Here the model gets the description of a tool with `defer_loading`."""

    type: Literal["tool_reference"]
    tool_name: GivenName


def _readable(block: Any) -> Any:
    match block:
        case {"type": str(kind)} if kind not in _KINDS:
            message = f"a block of type {kind[:40]!r} cannot be read: this model takes text only"
            # As Anthropic's API names it: by that, clients find the block that they have to leave out.
            raise field_error(message, kind[:40] if kind.isidentifier() else None)
        case {"type": str()}:
            return block
        case _:
            raise field_error("a block must be an object with a type")


def _as_blocks(content: Any) -> Any:
    """Return a list of blocks, also of a text."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


_ResultBlock = Annotated[
    Annotated[TextParam | ToolReferenceParam, Field(discriminator="type")],
    BeforeValidator(_readable),
]


class ToolResultParam(RequestModel):
    type: Literal["tool_result"]
    tool_use_id: GivenName
    content: Annotated[
        list[_ResultBlock],
        FailFast(),
        BeforeValidator(_as_blocks, json_schema_input_type=str | list[_ResultBlock]),
    ] = Field(default_factory=list)
    is_error: bool = False


_Block = Annotated[
    Annotated[
        TextParam | ThinkingParam | RedactedThinkingParam | ToolUseParam | ToolResultParam,
        Field(discriminator="type"),
    ],
    BeforeValidator(_readable),
]
# Only the first error is reported.
Content = Annotated[
    list[_Block], FailFast(), BeforeValidator(_as_blocks, json_schema_input_type=str | list[_Block])
]
SystemContent = Annotated[
    list[TextParam],
    FailFast(),
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextParam]),
]

_KINDS: Final = frozenset(
    {"text", "thinking", "redacted_thinking", "tool_use", "tool_result", "tool_reference"}
)
