"""A conversation of one client, in the store."""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar

from fastapi import Request

from app.api.openai.conversations.schemas import NewItem
from app.api.openai.responses.items.input_items import InputItem
from app.api.openai.responses.stored.errors import conversation_errors
from app.api.openai.responses.stored.own import OwnResponses
from app.api.serving import client_of, prepared
from app.http.errors.rejections import NotFound
from app.server_state import server_state
from app.storage.disk.in_thread import in_thread
from app.storage.responses.conversation_tables import ItemMissing, ItemsRefused
from app.storage.responses.conversations import ConversationStore
from batching import InvalidRequest

P = ParamSpec("P")
T = TypeVar("T")

# A method of the store that takes an owner and the id of a conversation first.
_Method = Callable[Concatenate[ConversationStore, str, str, P], T]


class OwnConversation:
    """A conversation that the client of a request names; it need not exist."""

    def __init__(self, request: Request, conversation_id: str) -> None:
        self._request = request
        self._store = server_state(request).storage.responses.conversations
        self._owner = client_of(request).key_digest
        self._id = conversation_id

    def call(self, method: _Method[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the store for this conversation; blocking.

        Raises:
            ConversationNotFound, ConversationLocked, Unavailable: see `conversation_errors`.
            NotFound: it has no such item.
            InvalidRequest: the items cannot be added.
        """
        try:
            with conversation_errors(self._id, "conversation_id"):
                return method(self._store, self._owner, self._id, *args, **kwargs)
        except ItemMissing as error:
            raise NotFound(f"Item with id '{error}' not found.") from None
        except ItemsRefused as error:
            param = "items" if error.index is None else f"items.{error.index}.id"
            raise InvalidRequest(param, str(error)) from None

    async def call_in_thread(self, method: _Method[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do what `call` does, to the end also if the caller's task is cancelled meanwhile."""
        return await in_thread(partial(self.call, method, *args, **kwargs))

    async def to_add(self, items: Sequence[NewItem]) -> dict[str, str]:
        """Return items of a request as they are stored, none a reference.

        Raises:
            ItemNotFound: the client has none with an id that is named.
            InvalidRequest: two items have the same id.
        """
        resolved = await OwnResponses(self._request).resolved(None, items, "items")
        return await prepared(self._request, lambda: _bodies(resolved))


def _bodies(items: Iterable[InputItem]) -> dict[str, str]:
    found: dict[str, str] = {}
    for index, item in enumerate(items):
        fields = item.to_stored()
        if fields["id"] in found:
            raise InvalidRequest(f"items.{index}.id", "another item has this id")
        found[fields["id"]] = json.dumps(fields)
    return found
