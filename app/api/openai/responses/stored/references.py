"""What a request refers to in the store: what it goes on from, and single items."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from pydantic import ValidationError

from app.api.openai.responses.items.input_items import (
    AnyItem,
    CompactionTrigger,
    InputItem,
    ItemReference,
    ReasoningItem,
    parse_item,
)
from app.api.openai.responses.stored.errors import conversation_errors
from app.api.openai.responses.stored.inputs import Item, parts_with_urls, stored_items
from app.api.schemas.fields import MAX_MESSAGES
from app.http.errors.invalid_requests import ItemNotFound, PreviousResponseNotFound
from app.prompts.conversation import SYSTEM_ROLES
from app.storage.responses.store import ResponseStore, StoredResponse
from batching import InvalidRequest

# For a request without items of its own.
_FACTOR_ALONE: Final = 2


class Before(NamedTuple):
    """What a request goes on from: the field that names it, and its id."""

    param: str
    id: str


@dataclass(slots=True)
class LatestResponse:
    """The latest response of a WebSocket, which goes on from it even if it is not stored."""

    response_id: str = ""
    stored: StoredResponse | None = None


class Resolver:
    """Reads what one request refers to; every call blocks.

    max_characters: the most characters of JSON that may come out of the store.
    """

    def __init__(
        self,
        store: ResponseStore,
        owner: str,
        max_characters: int,
        latest: LatestResponse | None = None,
    ) -> None:
        self._store = store
        self._latest = latest or LatestResponse()
        self._owner = owner
        self._max_characters = max_characters
        self._num_characters = 0
        self._read: dict[str, tuple[InputItem, int]] = {}
        # Of a conversation, also of items that a summary stands for.
        self._known_ids: set[str] = set()

    def resolved(
        self, before: Before | None, items: Sequence[AnyItem], param: str = "input"
    ) -> list[InputItem]:
        """Return the items before, and those of a field, none a reference.

        Raises:
            PreviousResponseNotFound, ConversationNotFound, ItemNotFound: the owner has none with an id that is named.
            InvalidRequest: something is not complete, or all is more than a request has.
        """
        resolved = [] if before is None else self._history(before, len(items))
        for index, item in enumerate(items):
            if isinstance(item, CompactionTrigger):
                raise InvalidRequest(f"{param}.{index}", "it must be the last item")
            if isinstance(item, ItemReference):
                item = self._item(f"{param}.{index}.id", item.id)
            resolved.append(self._with_new_id(item))
        return resolved

    def _with_new_id(self, item: InputItem) -> InputItem:
        """Return an item without its id if it is that of another: an item is in a conversation once."""
        return item.model_copy(update={"id": None}) if item.id in self._known_ids else item

    def _history(self, before: Before, num_new: int) -> list[InputItem]:
        # So that a summary can be made of what has reached a limit.
        factor = 1 if num_new else _FACTOR_ALONE
        self._max_characters *= factor
        is_conversation = before.param == "conversation"
        items = self._conversation(before.id) if is_conversation else self._previous(before.id)
        if len(items) + num_new > MAX_MESSAGES * factor:
            message = f"with the input it has more than {MAX_MESSAGES * factor} items"
            raise InvalidRequest(before.param, message)
        return [_reread(item, before.param) for item in items]

    def _conversation(self, conversation_id: str) -> list[Item]:
        """Return the items from the last summary on, and what stays of those before."""
        items: list[Item] = []
        is_summarized = False
        with conversation_errors(conversation_id):
            for item_id, body in self._store.conversations.backwards(self._owner, conversation_id):
                self._known_ids.add(item_id)
                # What is not told is not parsed, either, as it may be much.
                if is_summarized and not any(f'"{role}"' in body for role in SYSTEM_ROLES):
                    continue
                item = json.loads(body)
                if is_summarized and not _is_told(item):
                    continue
                self._count(len(body), "conversation")
                items.append(item)
                is_summarized = is_summarized or item["type"] == "compaction"
        return items[::-1]

    def _previous(self, response_id: str) -> list[Item]:
        if response_id == self._latest.response_id:
            stored = self._latest.stored
        else:
            stored = self._store.get(self._owner, response_id)
        if stored is None:
            raise PreviousResponseNotFound(response_id)
        if not stored.is_finished:
            raise InvalidRequest("previous_response_id", "this response is not finished")
        output = json.loads(stored.body)["output"]
        items = stored_items(stored)
        if any(item["type"] == "compaction" for item in output):
            items = [item for item in items if _is_told(item)]
        num_in_images = sum(len(part["image_url"]) for part in parts_with_urls(items))
        num_characters = len(stored.input) + num_in_images + len(json.dumps(output))
        self._count(num_characters, "previous_response_id")
        return [*items, *output]

    def _item(self, param: str, item_id: str) -> InputItem:
        if item_id not in self._read:
            if (text := self._store.item(self._owner, item_id)) is None:
                # Of a response OpenAI names the whole input.
                raise ItemNotFound(item_id, "input" if param.startswith("input.") else param)
            self._read[item_id] = _reread(json.loads(text), param), len(text)
        item, num_characters = self._read[item_id]
        self._count(num_characters, param)
        return item

    def _count(self, num_characters: int, param: str) -> None:
        self._num_characters += num_characters
        if self._num_characters > self._max_characters:
            limit = f"{self._max_characters} characters (MLX_SERVER_MAX_BODY_BYTES)"
            raise InvalidRequest(param, f"what it refers to is longer than {limit} in all")


def _is_told(item: Item) -> bool:
    """Return whether an item stays beside a summary, which stands for all but what the model is told."""
    return item.get("role") in SYSTEM_ROLES


def _reread(stored: dict[str, Any], param: str) -> InputItem:
    """Return an item out of the store; sealed reasoning is there as text, and outlives its key.

    Raises:
        InvalidRequest: a model wrote what no request may have, like a name that is too long.
    """
    try:
        item = parse_item(stored)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(map(str, first["loc"]))
        message = f"the stored {stored['type']} cannot be continued: {field}: {first['msg']}"
        raise InvalidRequest(param, message) from None
    assert not isinstance(item, ItemReference | CompactionTrigger), "what is stored is resolved"
    if isinstance(item, ReasoningItem) and (item.content or item.summary):
        return item.model_copy(update={"encrypted_content": None})
    return item
