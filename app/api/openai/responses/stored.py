"""The stored responses of one client."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any, Final, NamedTuple

import anyio
from fastapi import Request
from pydantic import ValidationError

from app.api.openai.responses.items.input_items import (
    AnyItem,
    CompactionTrigger,
    InputItem,
    ItemReference,
    ReasoningItem,
    parse_item,
)
from app.api.openai.responses.items.output_items import UNFINISHED, ResponseObject
from app.api.schemas.fields import MAX_MESSAGES
from app.api.serving import client_of, prepared
from app.http.errors.invalid_requests import ItemNotFound, PreviousResponseNotFound
from app.http.errors.rejections import NotFound
from app.http.streams.event_log import EventLog
from app.prompts.conversation import SYSTEM_ROLES
from app.server_state import server_state
from app.storage.in_thread import in_thread
from app.storage.responses import ResponseStore, StoredResponse
from batching import InvalidRequest

# An image that is stored apart is an object with its digest, where a client has the text of a URL.
_DIGEST: Final = "sha256"
_DATA: Final = "data:"

Item = dict[str, Any]


class StoredInput(NamedTuple):
    """The list of items that a response responds to, as JSON, and the images that it names by their digests."""

    items: str
    images: Mapping[str, str]


@dataclass(slots=True)
class LatestResponse:
    """The latest response of a WebSocket, which goes on from it even if it is not stored."""

    response_id: str = ""
    stored: StoredResponse | None = None


# In the state of a request: where it comes over a WebSocket, its LatestResponse.
LATEST: Final = "latest_response"


class OwnResponses:
    """The responses that the client of a request may see."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._store = server_state(request).storage.responses
        self._latest: LatestResponse | None = request.scope["state"].get(LATEST)
        self._owner = client_of(request).key_digest
        self._max_characters = server_state(request).settings.max_body_bytes

    async def put(
        self,
        response: ResponseObject,
        log: EventLog | None = None,
        *,
        input_items: Callable[[], StoredInput],
    ) -> None:
        """Add or update a response, to the end also if the caller's task is cancelled meanwhile.

        log: its events, if clients may follow them again.
        input_items: the list of what it responds to; called in a worker thread.

        Raises:
            OSError: it cannot be stored.
        """

        def put() -> None:
            stored = _to_store(response, log, input_items())
            self._store.put(self._owner, response.id, stored)

        # To its end: the response of a cancelled task must not be replaced by this one later.
        await in_thread(put)

    async def remember(
        self,
        response: ResponseObject,
        log: EventLog | None = None,
        *,
        input_items: Callable[[], StoredInput],
    ) -> None:
        """Keep a response that is not to be stored, for as long as the WebSocket is open and has no other."""
        if self._latest is not None:
            stored = await in_thread(lambda: _to_store(response, log, input_items()))
            self._latest.response_id, self._latest.stored = response.id, stored

    async def get(self, response_id: str) -> StoredResponse:
        """Return a response.

        Raises:
            NotFound: the client has none with this id.
        """
        return await anyio.to_thread.run_sync(self.read, response_id)

    def read(self, response_id: str) -> StoredResponse:
        """Do what `get` does; blocking."""
        if (stored := self._store.get(self._owner, response_id)) is None:
            raise NotFound(f"Response with id '{response_id}' not found.")
        return stored

    async def events(self, response_id: str) -> EventLog | None:
        """Return the events of a finished response; None if they were not kept."""

        def read() -> EventLog | None:
            packed = self._store.events(self._owner, response_id)
            return None if packed is None else EventLog.unpacked(packed)

        return await prepared(self._request, read)

    async def delete(self, response_id: str) -> None:
        await in_thread(partial(self._store.delete, self._owner, response_id))

    async def resolved(self, previous_id: str | None, items: Sequence[AnyItem]) -> list[InputItem]:
        """Return the input and the output of an earlier response, and the items, none a reference.

        Raises:
            PreviousResponseNotFound: the client has none with this id.
            ItemNotFound: the client has no item with an id that is named.
            InvalidRequest: something is not complete, or all is more than a request has.
        """

        def resolve() -> list[InputItem]:
            resolver = _Resolver(self._store, self._owner, self._max_characters, self._latest)
            return resolver.resolved(previous_id, items)

        return await prepared(self._request, resolve)


class _Resolver:
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

    def resolved(self, previous_id: str | None, items: Sequence[AnyItem]) -> list[InputItem]:
        history = [] if previous_id is None else self._history(previous_id)
        if len(history) + len(items) > MAX_MESSAGES:
            message = f"with the earlier response it has more than {MAX_MESSAGES} items"
            raise InvalidRequest("input", message)
        resolved = [_reread(item, "previous_response_id") for item in history]
        for index, item in enumerate(items):
            if isinstance(item, CompactionTrigger):
                raise InvalidRequest(f"input.{index}", "it must be the last item")
            known = self._item(index, item.id) if isinstance(item, ItemReference) else item
            resolved.append(known)
        return resolved

    def _history(self, response_id: str) -> list[Item]:
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
            # Its summary stands for all but what the model is told.
            items = [item for item in items if item.get("role") in SYSTEM_ROLES]
        num_in_images = sum(len(part["image_url"]) for part in _parts_with_urls(items))
        self._count(len(stored.input) + num_in_images + len(json.dumps(output)))
        return [*items, *output]

    def _item(self, index: int, item_id: str) -> InputItem:
        if item_id not in self._read:
            if (text := self._store.item(self._owner, item_id)) is None:
                raise ItemNotFound(item_id)
            self._read[item_id] = _reread(json.loads(text), f"input.{index}.id"), len(text)
        item, num_characters = self._read[item_id]
        self._count(num_characters)
        return item

    def _count(self, num_characters: int) -> None:
        self._num_characters += num_characters
        if self._num_characters > self._max_characters:
            message = f"what it refers to is longer than {self._max_characters} characters in all"
            raise InvalidRequest("input", message)


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


def _to_store(response: ResponseObject, log: EventLog | None, given: StoredInput) -> StoredResponse:
    body = response.model_dump_json(exclude_unset=True)
    is_finished = response.status not in UNFINISHED
    items = {item.id: item.model_dump_json(exclude_unset=True) for item in response.output}
    events = None if log is None else log.packed()
    return StoredResponse(body, given.items, is_finished, items, given.images, events)


def stored_input(items: Iterable[InputItem]) -> StoredInput:
    """Return the list of items; one whose id is there already gets another, as pages end at ids."""
    stored: dict[str, Item] = {}
    for item in items:
        fields = item.to_stored()
        if fields["id"] in stored:
            fields = item.model_copy(update={"id": None}).to_stored()
        stored[fields["id"]] = fields
    images: dict[str, str] = {}
    for part in _parts_with_urls(stored.values()):
        if (url := part["image_url"])[: len(_DATA)].lower() == _DATA:
            digest = sha256(url.encode()).hexdigest()
            images[digest] = url
            part["image_url"] = {_DIGEST: digest}
    return StoredInput(json.dumps(list(stored.values())), images)


def stored_items(stored: StoredResponse) -> list[Item]:
    """Return the items that a response responds to, with their images."""
    items: list[Item] = json.loads(stored.input)
    for part in _parts_with_urls(items):
        if isinstance(url := part["image_url"], dict):
            part["image_url"] = stored.images[url[_DIGEST]]
    return items


def _parts_with_urls(items: Iterable[Item]) -> Iterator[dict[str, Any]]:
    """Yield the images of messages and of outputs of calls; an uploaded one has no URL."""
    for item in items:
        for parts in (item.get("content"), item.get("output")):
            if isinstance(parts, list):
                yield from (part for part in parts if "image_url" in part)
