"""`/v1/conversations`: conversations without their items."""

import json

from fastapi import APIRouter, Request

from app.api.openai.conversations.own import OwnConversation
from app.api.openai.conversations.schemas import (
    ConversationCreation,
    ConversationObject,
    ConversationUpdate,
    DeletedConversation,
)
from app.api.openai.responses.items.input_items import new_item_id
from app.api.schemas.errors import ERROR_RESPONSES
from app.http.json_body import JsonRoute
from app.storage.responses.conversations import ConversationStore

router = APIRouter(route_class=JsonRoute, prefix="/v1/conversations", responses=ERROR_RESPONSES)


@router.post("")
async def create_conversation(body: ConversationCreation, request: Request) -> ConversationObject:
    """Begin a conversation, with its first items if there are any."""
    own = OwnConversation(request, new_item_id("conv"))
    items = await own.to_add(body.items)
    metadata = json.dumps(body.metadata)
    return ConversationObject.of(
        await own.call_in_thread(ConversationStore.create, metadata, items)
    )


@router.get("/{conversation_id}")
async def get_conversation(conversation_id: str, request: Request) -> ConversationObject:
    """Return a conversation."""
    own = OwnConversation(request, conversation_id)
    return ConversationObject.of(await own.call_in_thread(ConversationStore.get))


@router.post("/{conversation_id}")
async def update_conversation(
    conversation_id: str, body: ConversationUpdate, request: Request
) -> ConversationObject:
    """Replace the metadata of a conversation."""
    own = OwnConversation(request, conversation_id)
    metadata = json.dumps(body.metadata)
    return ConversationObject.of(await own.call_in_thread(ConversationStore.update, metadata))


@router.delete("/{conversation_id}")
async def delete_conversation(conversation_id: str, request: Request) -> DeletedConversation:
    """Delete a conversation with its items; a response that goes on from it then adds to nothing."""
    own = OwnConversation(request, conversation_id)
    await own.call_in_thread(ConversationStore.delete)
    return DeletedConversation(id=conversation_id)
