"""The stored responses of one client."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Final

import anyio
from fastapi import Request

from app.api.openai.responses.items.input_items import AnyItem, InputItem
from app.api.openai.responses.items.output_items import UNFINISHED, ResponseObject
from app.api.openai.responses.stored.errors import conversation_errors
from app.api.openai.responses.stored.inputs import StoredInput
from app.api.openai.responses.stored.references import Before, LatestResponse, Resolver
from app.api.serving import client_of, prepared
from app.http.errors.rejections import NotFound
from app.http.request_lifetime import held_by
from app.http.streams.event_log import EventLog
from app.server_state import server_state
from app.storage.disk.in_thread import in_thread
from app.storage.responses.conversation_tables import ItemsRefused
from app.storage.responses.conversation_turns import ConversationTurn
from app.storage.responses.conversations import Addition
from app.storage.responses.store import StoredResponse
from batching import InvalidRequest

# The statuses of responses whose items join a conversation: what failed can be tried again.
_JOINING: Final = ("completed", "incomplete")
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
        turn: ConversationTurn | None = None,
        store: bool = True,
    ) -> None:
        """Add or update a response, to the end also if the caller's task is cancelled meanwhile.

        Its items join its conversation even if it is not to be stored, as OpenAI's do.

        log: its events, if clients may follow them again.
        input_items: the list of what it responds to; called in a worker thread.
        turn: of the response in its conversation; it ends with the response, whose items join the conversation.
        store: otherwise it is kept for as long as the WebSocket is open and has no other.

        Raises:
            Unavailable: its items cannot join the conversation.
            OSError: it cannot be stored.
        """
        if not store and self._latest is None and turn is None:
            return

        def put() -> StoredResponse:
            stored = _to_store(response, log, input_items(), turn)
            if store:
                self._store.put(self._owner, response.id, stored)
            elif stored.addition is not None:
                self._store.conversations.finish(stored.addition)
            return stored

        # To its end: the response of a cancelled task must not be replaced by this one later.
        with _reported(response, turn):
            stored = await in_thread(put)
        if not store and self._latest is not None:
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

    async def take_turn(self, conversation_id: str) -> ConversationTurn:
        """Begin the turn of a response in its conversation; it ends with the request at the latest.

        Raises:
            ConversationNotFound: the client has none with this id.
            ConversationLocked: another response has its turn.
            InvalidRequest: it has so many bytes that no more can be added.
            Unavailable: nothing can be stored.
        """
        conversations = self._store.conversations
        with conversation_errors(conversation_id):
            turn = conversations.turns.take(self._owner, conversation_id)
            held_by(self._request).callback(turn.close)
            try:
                await in_thread(partial(conversations.use, turn))
            except ItemsRefused as error:
                raise InvalidRequest("conversation", str(error)) from None
        return turn

    async def resolved(
        self, before: Before | None, items: Sequence[AnyItem], param: str = "input"
    ) -> list[InputItem]:
        """Return the items that a request goes on from, and its own; see `Resolver.resolved`."""

        def resolve() -> list[InputItem]:
            resolver = Resolver(self._store, self._owner, self._max_characters, self._latest)
            return resolver.resolved(before, items, param)

        return await prepared(self._request, resolve)


def _reported(
    response: ResponseObject, turn: ConversationTurn | None
) -> AbstractContextManager[None]:
    """Return what fails a response whose items do not join its conversation, as the next one would miss them."""
    if turn is None or response.status not in _JOINING:
        return nullcontext()
    return conversation_errors(turn.conversation_id)


def _to_store(
    response: ResponseObject,
    log: EventLog | None,
    given: StoredInput,
    turn: ConversationTurn | None,
) -> StoredResponse:
    body = response.model_dump_json(exclude_unset=True)
    is_finished = response.status not in UNFINISHED
    output = {item.id: item.model_dump_json(exclude_unset=True) for item in response.output}
    events = None if log is None else log.packed()
    addition = None
    if turn is not None and is_finished:
        joining = {**given.joining, **output} if response.status in _JOINING else {}
        addition = Addition(turn, joining)
    return StoredResponse(body, given.items, is_finished, output, given.images, events, addition)
