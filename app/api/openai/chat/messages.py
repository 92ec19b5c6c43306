"""The turns of a conversation, as chat requests have them."""

from functools import partial
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, FailFast, Field, WrapValidator, model_validator

from app.api.openai.schemas import unsupported
from app.api.openai.schemas.parts.media_parts import (
    Detail,
    check_no_media,
    read_chat_file,
    read_image_url,
)
from app.api.openai.schemas.parts.text_parts import join_parts, keep_marks
from app.api.openai.schemas.tool_calling.tools import AnyToolCall
from app.api.schemas.base import RequestModel
from app.api.schemas.fields import MAX_MESSAGES, Text, check_length, field_error
from app.prompts.conversation import SYSTEM_ROLES, ChatMessage

_MAX_TOOL_CALLS: Final = 8192  # in all turns together
# OpenAI's; images of tools are vLLM's.
_TEXT_ROLES: Final = (*SYSTEM_ROLES, "assistant")
_TEXT_FIELDS: Final = {"text": "text", "refusal": "refusal"}


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class RefusalPart(BaseModel):
    type: Literal["refusal"]
    refusal: str


class ImageURL(BaseModel):
    url: str
    detail: Detail = "auto"


class ImagePart(BaseModel):
    type: Literal["image_url"]
    image_url: ImageURL


class FileFields(BaseModel):
    file_data: str | None = None
    file_id: str | None = None
    filename: str | None = None


class FilePart(BaseModel):
    type: Literal["file"]
    file: FileFields


_READ: Final = {"image_url": read_image_url, "file": read_chat_file}
Content = Annotated[
    Text,
    WrapValidator(keep_marks),
    BeforeValidator(
        partial(join_parts, fields=_TEXT_FIELDS, others=_READ),
        json_schema_input_type=str | list[TextPart | ImagePart | FilePart | RefusalPart],
    ),
]


class MessageParam(RequestModel):
    """One turn of the conversation; the content of an assistant may be null, which is empty."""

    defaults = unsupported.MESSAGE

    role: str = Field(
        min_length=1,
        max_length=64,
        description="`system`, `developer`, `user`, `assistant`, `tool`, or what the template knows.",
    )
    content: Content
    name: Text | None = None
    reasoning_content: Text | None = Field(default=None, description="Or `reasoning`.")
    tool_calls: list[AnyToolCall] = Field(default_factory=list)
    tool_call_id: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_turn(cls, data: Any) -> Any:
        match data:
            case {"role": "function"}:
                raise field_error("this role is called 'tool' now")
            case {"role": "assistant"}:
                return _with_one_spelling(data)
            case _:
                return data

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.role in _TEXT_ROLES:
            check_no_media(self.content, self.role)
        return self

    @model_validator(mode="after")
    def _check_tool_fields(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise field_error("only an assistant calls tools", "tool_calls")
        if self.role == "tool" and self.tool_call_id is None:
            raise field_error("a tool's result needs the id of its call", "tool_call_id")
        return self

    def to_message(self) -> ChatMessage:
        return ChatMessage(
            role=self.role,
            content=self.content,
            name=self.name,
            reasoning=self.reasoning_content,
            tool_calls=[call.to_call() for call in self.tool_calls],
            tool_call_id=self.tool_call_id,
        )


def _with_one_spelling(turn: dict[str, Any]) -> dict[str, Any]:
    """Return an assistant's turn in one spelling of the several that clients use."""
    also = {"reasoning_content": turn.get("reasoning"), "content": turn.get("refusal")}
    present = _not_none(also) | _not_none(turn)
    if "content" in turn or present.get("tool_calls"):
        present.setdefault("content", "")
    return present


def _not_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _checked_lengths(messages: Any) -> Any:
    """Reject too many turns or tool calls before each is looked at."""
    if not isinstance(messages, list):
        return messages
    check_length(messages, MAX_MESSAGES)
    calls = [turn.get("tool_calls") for turn in messages if isinstance(turn, dict)]
    if sum(len(each) for each in calls if isinstance(each, list)) > _MAX_TOOL_CALLS:
        raise field_error(f"its turns have more than {_MAX_TOOL_CALLS} tool calls")
    return messages


# Only the first error is reported.
Messages = Annotated[
    list[MessageParam],
    FailFast(),
    Field(min_length=1),
    BeforeValidator(
        _checked_lengths,
        json_schema_input_type=Annotated[
            list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES)
        ],
    ),
]
