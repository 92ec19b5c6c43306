"""`/v1/conversations/{conversation_id}/items`: the items of a conversation."""

import json
from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Query, Request, Response

from app.api.openai.conversations.own import OwnConversation
from app.api.openai.conversations.schemas import ConversationObject, ItemCreation
from app.api.openai.responses.conversation import REASONING
from app.api.openai.responses.items.item_list import ItemList
from app.api.openai.responses.request import ENCRYPTED_REASONING, Includable
from app.api.openai.responses.stored.inputs import Item
from app.api.schemas.errors import ERROR_RESPONSES
from app.api.serving import written
from app.http.errors.rejections import NotFound
from app.http.json_body import JsonRoute
from app.server_state import server_state
from app.storage.responses.conversations import ConversationStore
from batching import InvalidRequest

router = APIRouter(
    route_class=JsonRoute,
    prefix="/v1/conversations/{conversation_id}/items",
    responses=ERROR_RESPONSES,
)

# These have no status in a conversation, though they have one in the input of a response.
_WITHOUT_STATUS: Final = ("custom_tool_call", "custom_tool_call_output")

_Include = list[Includable] | None


class ItemWriter:
    """Writes items as the client asks for them.

    Of `include`, `reasoning.encrypted_content` seals reasoning that is not sealed.  The other values are of fields that
    an item has anyway, or of hosted tools, which do not run here.
    """

    def __init__(
        self,
        request: Request,
        include: Annotated[_Include, Query(max_length=64)] = None,
        in_brackets: Annotated[
            _Include,
            Query(
                alias="include[]",
                max_length=64,
                description="The same as `include`, as OpenAI's SDKs write it.",
            ),
        ] = None,
    ) -> None:
        included = {*(include or ()), *(in_brackets or ())}
        self._sealer = server_state(request).sealer if ENCRYPTED_REASONING in included else None

    def item(self, body: str) -> Item:
        item: Item = json.loads(body)
        if item["type"] in _WITHOUT_STATUS:
            item.pop("status", None)
        if self._sealer is not None and item["type"] == "reasoning":
            text = "".join(part["text"] for part in item.get("content") or item["summary"])
            item.setdefault("encrypted_content", self._sealer.seal(REASONING, text))
        return item

    def page(self, bodies: Iterable[str], *, has_more: bool) -> str:
        return ItemList.of([*map(self.item, bodies)], has_more=has_more).model_dump_json()


AsWritten = Annotated[ItemWriter, Depends()]


@router.post("", response_model=ItemList)
async def create_items(
    conversation_id: str, body: ItemCreation, request: Request, writer: AsWritten
) -> Response:
    """Add items at the end of a conversation, unless a response is adding to it."""
    own = OwnConversation(request, conversation_id)
    items = await own.to_add(body.items)
    await own.call_in_thread(ConversationStore.add, items)
    page = await written(request, lambda: writer.page(items.values(), has_more=False))
    return Response(page, media_type="application/json")


@router.get("", response_model=ItemList)
async def list_items(
    conversation_id: str,
    request: Request,
    writer: AsWritten,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """List the items of a conversation, the last one first."""
    own = OwnConversation(request, conversation_id)

    def page() -> str:
        try:
            found = own.call(ConversationStore.page, after=after, limit=limit, order=order)
        except NotFound:
            raise InvalidRequest("after", "there is no item with this id") from None
        return writer.page(found.items, has_more=found.has_more)

    return Response(await written(request, page), media_type="application/json")


@router.get("/{item_id}", response_model=dict[str, Any])
async def get_item(
    conversation_id: str, item_id: str, request: Request, writer: AsWritten
) -> Response:
    """Return an item of a conversation."""
    own = OwnConversation(request, conversation_id)

    def item() -> str:
        return json.dumps(writer.item(own.call(ConversationStore.item, item_id)))

    return Response(await written(request, item), media_type="application/json")


@router.delete("/{item_id}")
async def delete_item(conversation_id: str, item_id: str, request: Request) -> ConversationObject:
    """Delete an item, unless a response is adding to its conversation, which is returned."""
    own = OwnConversation(request, conversation_id)
    stored = await own.call_in_thread(ConversationStore.delete_item, item_id)
    return ConversationObject.of(stored)
