"""`/v1/conversations`: the requests and the objects."""

import json
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator

from app.api.openai.responses.items.input_items import (
    CompactionTrigger,
    InputItem,
    ItemReference,
    parse_item,
)
from app.api.schemas.base import RequestModel
from app.api.schemas.fields import Metadata, check_length, field_error
from app.storage.responses.conversation_tables import StoredConversation

_MAX_ITEMS: Final = 20

NewItem = InputItem | ItemReference


def _parse(data: Any) -> NewItem:
    item = parse_item(data)
    if isinstance(item, CompactionTrigger):
        raise field_error("it asks for a response, so it is an item of an input only", "type")
    return item


def _check_number(value: Any) -> Any:
    if isinstance(value, list):
        check_length(value, _MAX_ITEMS)
    return value


_NewItems = Annotated[
    list[Annotated[NewItem, BeforeValidator(_parse)]],
    FailFast(),
    BeforeValidator(
        _check_number,
        json_schema_input_type=Annotated[list[NewItem], Field(max_length=_MAX_ITEMS)],
    ),
]


class _Request(RequestModel):
    """Unlike other requests these have no fields but OpenAI's."""

    model_config = ConfigDict(extra="forbid")


class ConversationCreation(_Request):
    items: _NewItems = Field(default_factory=list)
    metadata: Metadata = Field(default_factory=dict)


class ConversationUpdate(_Request):
    """`metadata` replaces what was there; null clears it."""

    metadata: Metadata

    @model_validator(mode="before")
    @classmethod
    def _clear(cls, data: Any) -> Any:
        is_cleared = isinstance(data, dict) and data.get("metadata", ...) is None
        return data | {"metadata": {}} if is_cleared else data


class ItemCreation(_Request):
    items: _NewItems


class ConversationObject(BaseModel):
    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]

    @classmethod
    def of(cls, stored: StoredConversation) -> Self:
        return cls(id=stored.id, created_at=stored.created, metadata=json.loads(stored.metadata))


class DeletedConversation(BaseModel):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True
