"""Requests to `/v1/conversations`, and what comes back held against the types of OpenAI's client."""

from typing import Any, Final

from openai.types.conversations import Conversation, ConversationItemList

from tests.support.sdk_types import check_shape
from tests.support.speaker import Served

CONVERSATIONS: Final = "/v1/conversations"


def user(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": text} | fields


async def begin(server: Served, *items: Any, **fields: Any) -> str:
    """Begin a conversation with items; return its id."""
    answer = await server.post(CONVERSATIONS, {"items": items} | fields)
    assert answer.status_code == 200, answer.text
    conversation_id: str = checked_conversation(answer.json())["id"]
    return conversation_id


async def items_of(server: Served, conversation_id: str, **params: Any) -> list[dict[str, Any]]:
    """Return the items of a conversation, the first one first."""
    path = f"{CONVERSATIONS}/{conversation_id}/items"
    answer = await server.client.get(path, params={"order": "asc"} | params)
    assert answer.status_code == 200, answer.text
    return checked_page(answer.json())


async def texts_of(server: Served, conversation_id: str) -> list[str]:
    """Return the texts of the messages of a conversation."""
    items = await items_of(server, conversation_id)
    return [item["content"][0]["text"] for item in items if item["type"] == "message"]


def checked_conversation(answer: dict[str, Any]) -> dict[str, Any]:
    check_shape(answer, Conversation)
    return answer


def checked_page(answer: dict[str, Any]) -> list[dict[str, Any]]:
    check_shape(answer, ConversationItemList)
    items: list[dict[str, Any]] = answer["data"]
    return items
