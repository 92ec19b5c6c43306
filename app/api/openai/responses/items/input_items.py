"""The items of a request's input: messages, reasoning, calls and their outputs."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal, Self
from uuid import uuid4

from pydantic import BaseModel, BeforeValidator, FailFast, Field, WrapValidator, model_validator

from app.api.openai.responses.items.output_items import ItemStatus
from app.api.openai.responses.items.tools import (
    AnyTool,
    CallableTool,
    ToolList,
    callable_tools,
    qualified_name,
)
from app.api.openai.schemas.parts.media_parts import (
    Detail,
    check_no_media,
    read_file,
    read_input_image,
)
from app.api.openai.schemas.parts.text_parts import join_parts, keep_marks
from app.api.openai.schemas.tool_calling.custom_tools import custom_arguments
from app.api.schemas.base import RequestModel
from app.api.schemas.by_type import by_type
from app.api.schemas.fields import MAX_MESSAGES, GivenName, Text, check_length
from app.prompts.conversation import ToolCall
from app.prompts.images.image_marks import ImageSource, MarkedText, Source, split

_TEXT_FIELDS: Final = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}


class TextPart(BaseModel):
    type: Literal["input_text", "output_text", "refusal"]
    text: str


class ImagePart(BaseModel):
    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None
    detail: Detail = "auto"


class FilePart(BaseModel):
    type: Literal["input_file"]
    file_data: str | None = None
    file_id: str | None = None
    filename: str | None = None


_TextContent = Annotated[
    Text,
    BeforeValidator(
        partial(join_parts, fields=_TEXT_FIELDS), json_schema_input_type=str | list[TextPart]
    ),
]
_READ: Final = {"input_image": read_input_image, "input_file": read_file}
_Content = Annotated[
    Text,
    WrapValidator(keep_marks),
    BeforeValidator(
        partial(join_parts, fields=_TEXT_FIELDS, others=_READ),
        json_schema_input_type=str | list[TextPart | ImagePart | FilePart],
    ),
]


def new_item_id(prefix: str) -> str:
    """Return the id of an item or a response; it never becomes part of a prompt."""
    return f"{prefix}_{uuid4().hex}"


class _Item(RequestModel):
    id: Annotated[Text, Field(max_length=256)] | None = None
    status: ItemStatus | None = None

    def _stored(self, prefix: str, **fields: Any) -> dict[str, Any]:
        """Return the item as the list of a response's input shows it."""
        common = {"id": self.id or new_item_id(prefix), "status": self.status or "completed"}
        return common | {name: value for name, value in fields.items() if value is not None}

    def _own_fields(self) -> dict[str, Any]:
        return self.model_dump(exclude={"id", "status"})


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.role == "assistant":
            check_no_media(self.content, self.role)
        return self

    def to_stored(self) -> dict[str, Any]:
        parts = _stored_parts(self.content)
        if self.role == "assistant":
            text = {"type": "output_text", "text": self.content}
            parts = [text | {"annotations": [], "logprobs": []}]
        return self._stored("msg", type="message", role=self.role, content=parts)


class ReasoningItem(_Item):
    """Reasoning that a response had; its text is the sealed one, else the content, else the summary."""

    type: Literal["reasoning"]
    summary: _TextContent = ""
    content: _TextContent = ""
    encrypted_content: Text | None = None

    def to_stored(self) -> dict[str, Any]:
        summary = [{"type": "summary_text", "text": self.summary}] if self.summary else []
        content = [{"type": "reasoning_text", "text": self.content}] if self.content else None
        return self._stored(
            "rs",
            type="reasoning",
            summary=summary,
            content=content,
            encrypted_content=self.encrypted_content,
        )


class _CallItem(_Item):
    call_id: GivenName
    name: GivenName
    namespace: GivenName | None = None

    def _call(self, arguments: str) -> ToolCall:
        return ToolCall(self.call_id, qualified_name(self.name, self.namespace), arguments)


class FunctionCallItem(_CallItem):
    type: Literal["function_call"]
    arguments: Text = ""

    def to_call(self) -> ToolCall:
        return self._call(self.arguments)

    def to_stored(self) -> dict[str, Any]:
        return self._stored("fc", **self._own_fields())


class CustomToolCallItem(_CallItem):
    """A call whose input is text; the model knows it as the argument `input`."""

    type: Literal["custom_tool_call"]
    input: Text = ""

    def to_call(self) -> ToolCall:
        return self._call(custom_arguments(self.input))

    def to_stored(self) -> dict[str, Any]:
        return self._stored("ctc", **self._own_fields())


class CallOutputItem(_Item):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: GivenName
    output: _Content

    def to_stored(self) -> dict[str, Any]:
        prefix = "fco" if self.type == "function_call_output" else "ctco"
        fields = self._own_fields()
        if isinstance(self.output, MarkedText):
            fields["output"] = _stored_parts(self.output)
        return self._stored(prefix, **fields)


def _stored_parts(content: str) -> list[dict[str, Any]]:
    """Return the parts of a text with images and files, of which at least one is there."""
    return [_stored_part(part) for part in split(content)] or [{"type": "input_text", "text": ""}]


def _stored_part(part: str | Source) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "input_text", "text": part}
    if isinstance(part, ImageSource):
        field = "file_id" if part.form == "file" else "image_url"
        return {"type": "input_image", "detail": part.detail, field: part.value}
    named = {} if part.name is None else {"filename": part.name}
    field = "file_id" if part.form == "file" else "file_data"
    return {"type": "input_file", field: part.value, **named}


class AdditionalToolsItem(_Item):
    """Tools that join those of the request; the model knows all of them from the beginning."""

    type: Literal["additional_tools"]
    role: Literal["developer"] = "developer"
    tools: ToolList

    def to_stored(self) -> dict[str, Any]:
        return {"id": self.id or new_item_id("at")} | self._own_fields()


class CompactionItem(_Item):
    """A conversation whose summary is sealed."""

    type: Literal["compaction", "compaction_summary"]
    encrypted_content: Text

    def to_stored(self) -> dict[str, Any]:
        return {"id": self.id or new_item_id("cmp")} | self._own_fields() | {"type": "compaction"}


class CompactionTrigger(RequestModel):
    """The end of an input that is to be compacted."""

    type: Literal["compaction_trigger"]


class ItemReference(RequestModel):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"] = "item_reference"
    id: Annotated[Text, Field(max_length=256)]


Turn = MessageItem | ReasoningItem | FunctionCallItem | CustomToolCallItem | CallOutputItem
InputItem = Turn | AdditionalToolsItem | CompactionItem
AnyItem = InputItem | ItemReference | CompactionTrigger

_KINDS: Final[dict[str, Callable[[Any], AnyItem]]] = {
    "message": MessageItem.model_validate,
    "reasoning": ReasoningItem.model_validate,
    "function_call": FunctionCallItem.model_validate,
    "custom_tool_call": CustomToolCallItem.model_validate,
    "function_call_output": CallOutputItem.model_validate,
    "custom_tool_call_output": CallOutputItem.model_validate,
    "additional_tools": AdditionalToolsItem.model_validate,
    "compaction": CompactionItem.model_validate,
    "compaction_summary": CompactionItem.model_validate,
    "compaction_trigger": CompactionTrigger.model_validate,
    "item_reference": ItemReference.model_validate,
}
_parse: Final = by_type(_KINDS)


def parse_item(data: Any) -> AnyItem:
    """Return the item of an object; one without a type is a message, or a reference if it has but an id."""
    if isinstance(data, dict) and data.get("type") is None:
        is_reference = "id" in data and "role" not in data
        data = data | {"type": "item_reference" if is_reference else "message"}
    return _parse(data)


def all_tools(tools: Sequence[AnyTool], items: Iterable[AnyItem]) -> dict[str, CallableTool]:
    """Return the tools of a request and of its items, by the name that the model knows."""
    found = {tool.spec.name: tool for tool in callable_tools(tools)}
    for item in items:
        if isinstance(item, AdditionalToolsItem):
            found |= {tool.spec.name: tool for tool in callable_tools(item.tools)}
    return found


def as_items(value: Any) -> Any:
    """Return the list of items; a text is the message of a user."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, list):
        check_length(value, MAX_MESSAGES)
    return value


_Items = Annotated[list[AnyItem], Field(max_length=MAX_MESSAGES)]
# Only the first error is reported.
InputItems = Annotated[
    list[Annotated[AnyItem, BeforeValidator(parse_item)]],
    FailFast(),
    BeforeValidator(as_items, json_schema_input_type=str | _Items),
]
