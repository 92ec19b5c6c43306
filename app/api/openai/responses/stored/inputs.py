"""The input of a response as it is stored: a list of items, with their images apart."""

import json
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from itertools import islice
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from app.api.openai.responses.items.input_items import InputItem
from app.storage.responses.store import StoredResponse

# An image that is stored apart is an object with its digest, where a client has the text of a URL.
_DIGEST: Final = "sha256"
_DATA: Final = "data:"

Item = dict[str, Any]


class StoredInput(NamedTuple):
    """The list of items that a response responds to, as JSON, and the images that it names by their digests.

    joining: the items that join a conversation, as JSON by their ids, with their images.
    """

    items: str
    images: Mapping[str, str]
    joining: Mapping[str, str] = MappingProxyType({})


def stored_input(items: Iterable[InputItem], num_before: int | None = None) -> StoredInput:
    """Return the list of items; one whose id is there already gets another, as pages end at ids.

    num_before: how many are of a conversation, which the others join; None if there is none.
    """
    stored: dict[str, Item] = {}
    for item in items:
        fields = item.to_stored()
        if fields["id"] in stored:
            fields = item.model_copy(update={"id": None}).to_stored()
        stored[fields["id"]] = fields
    new = () if num_before is None else islice(stored.items(), num_before, None)
    joining = {item_id: json.dumps(item) for item_id, item in new}
    images: dict[str, str] = {}
    for part in parts_with_urls(stored.values()):
        if (url := part["image_url"])[: len(_DATA)].lower() == _DATA:
            digest = sha256(url.encode()).hexdigest()
            images[digest] = url
            part["image_url"] = {_DIGEST: digest}
    return StoredInput(json.dumps(list(stored.values())), images, joining)


def stored_items(stored: StoredResponse) -> list[Item]:
    """Return the items that a response responds to, with their images."""
    items: list[Item] = json.loads(stored.input)
    for part in parts_with_urls(items):
        if isinstance(url := part["image_url"], dict):
            part["image_url"] = stored.images[url[_DIGEST]]
    return items


def parts_with_urls(items: Iterable[Item]) -> Iterator[dict[str, Any]]:
    """Yield the images of messages and of outputs of calls; an uploaded one has no URL."""
    for item in items:
        for parts in (item.get("content"), item.get("output")):
            if isinstance(parts, list):
                yield from (part for part in parts if "image_url" in part)
