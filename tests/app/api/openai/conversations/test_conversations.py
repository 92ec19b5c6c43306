"""Conversations and their items: made, changed, listed and deleted by their own client only."""

from typing import Any, Final

import pytest
from openai.types.conversations import ConversationDeletedResource, ConversationItem
from pydantic import SecretStr

from app.storage.disk.database import StorageError
from app.storage.responses.conversations import ConversationStore
from tests.support.conversations import (
    CONVERSATIONS,
    begin,
    checked_conversation,
    checked_page,
    items_of,
    texts_of,
    user,
)
from tests.support.responses import Thinking, custom, function, response, without_ids
from tests.support.sdk_types import check_shape
from tests.support.speaker import Served, served

pytestmark = pytest.mark.anyio

IMAGE: Final = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "low"}
# Of each kind.
ITEMS: Final[list[dict[str, Any]]] = [
    {"role": "developer", "content": "Be kind."},
    user("Hi"),
    {"role": "user", "content": [{"type": "input_text", "text": "See"}, IMAGE]},
    {"role": "user", "content": [{"type": "input_file", "file_id": "file-1"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
    {"role": "assistant", "content": "Well."},
    {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "2"},
    {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "2", "output": [IMAGE]},
    {"type": "additional_tools", "role": "developer", "tools": [custom(), function()]},
    {"type": "compaction_summary", "encrypted_content": "sealed"},
]


async def statuses(server: Served, conversation_id: str, item_id: str) -> set[int]:
    """Return the statuses of all requests that name a conversation and an item."""
    path = f"{CONVERSATIONS}/{conversation_id}"
    answers = [
        await server.client.get(path),
        await server.post(path, {"metadata": {}}),
        await server.post(f"{path}/items", {"items": []}),
        await server.client.get(f"{path}/items"),
        await server.client.get(f"{path}/items/{item_id}"),
        await server.client.delete(f"{path}/items/{item_id}"),
        await server.client.delete(path),
    ]
    return {answer.status_code for answer in answers}


async def test_a_conversation_is_made_changed_and_deleted() -> None:
    async with served() as server:
        made = await server.post(CONVERSATIONS, {"metadata": {"k": "v"}})
        conversation = checked_conversation(made.json())
        path = f"{CONVERSATIONS}/{conversation['id']}"
        assert (await server.client.get(path)).json() == conversation
        for metadata, kept in (({"a": "b"}, {"a": "b"}), (None, {}), ({}, {})):
            changed = await server.post(path, {"metadata": metadata})
            assert changed.json() == conversation | {"metadata": kept}
        assert (await server.client.get(f"{path}/items")).json()["data"] == []
        deleted = (await server.client.delete(path)).json()
        gone = await server.client.get(path)
    assert conversation["metadata"] == {"k": "v"}
    check_shape(deleted, ConversationDeletedResource)
    assert (deleted["id"], deleted["deleted"]) == (conversation["id"], True)
    assert gone.status_code == 404
    assert gone.json()["error"] == {
        "message": f"Conversation with id '{conversation['id']}' not found.",
        "type": "invalid_request_error",
        "param": "conversation_id",
        "code": "not_found",
    }


async def test_items_of_all_kinds_have_openais_shape() -> None:
    async with served() as server:
        conversation_id = await begin(server, *ITEMS[:6])
        path = f"{CONVERSATIONS}/{conversation_id}/items"
        added = await server.post(path, {"items": ITEMS[6:]})
        items = await items_of(server, conversation_id)
        assert checked_page(added.json()) == items[6:]
        assert (added.json()["first_id"], added.json()["has_more"]) == (items[6]["id"], False)
        for item in items:
            found = (await server.client.get(f"{path}/{item['id']}")).json()
            check_shape(found, ConversationItem)
            assert found == item
    kinds = [item.get("type", "message") for item in ITEMS]
    assert [item["type"] for item in items] == [*kinds[:-1], "compaction"]
    assert items[2]["content"][1] == items[9]["output"][0] == IMAGE


async def test_items_are_listed_in_pages() -> None:
    async with served() as server:
        conversation_id = await begin(server, *map(user, "abc"))
        path = f"{CONVERSATIONS}/{conversation_id}/items"
        latest = (await server.client.get(path, params={"limit": 2})).json()
        rest = (await server.client.get(path, params={"after": latest["last_id"]})).json()
        forwards = await items_of(server, conversation_id)
        missing = await server.client.get(path, params={"after": "nothing"})
    assert [item["content"][0]["text"] for item in checked_page(latest)] == ["c", "b"]
    assert (latest["has_more"], rest["has_more"]) == (True, False)
    assert [*rest["data"], *reversed(latest["data"])] == forwards
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "after")


async def test_an_item_is_deleted() -> None:
    async with served() as server:
        conversation_id = await begin(server, user("a", id="mine"), user("b"), metadata={"k": "v"})
        path = f"{CONVERSATIONS}/{conversation_id}"
        deleted = await server.client.delete(f"{path}/items/mine")
        assert checked_conversation(deleted.json()) == (await server.client.get(path)).json()
        assert await texts_of(server, conversation_id) == ["b"]
        for method in ("GET", "DELETE"):
            missing = await server.client.request(method, f"{path}/items/mine")
            assert missing.status_code == 404
            assert missing.json()["error"]["message"] == "Item with id 'mine' not found."


async def test_reasoning_is_sealed_if_that_is_included() -> None:
    include = "reasoning.encrypted_content"
    async with served(b"<think>hm</think>4", tokenizer=Thinking()) as server:
        conversation_id = await begin(server, ITEMS[4])
        await response(server, conversation=conversation_id)
        for params in ({"include": include}, {"include[]": [include, include]}):
            items = await items_of(server, conversation_id, **params)
            sealed = [item for item in items if item["type"] == "reasoning"]
            for item in sealed:
                assert server.service.sealer.unseal("reasoning", item["encrypted_content"]) == "hm"
            assert len(sealed) == 2
        path = f"{CONVERSATIONS}/{conversation_id}/items"
        added = await server.post(f"{path}?include={include}", {"items": [ITEMS[4]]})
        assert added.json()["data"][0]["encrypted_content"]
        bare = await items_of(server, conversation_id, include="message.output_text.logprobs")
        assert not any("encrypted_content" in item for item in bare)
        sent_back = await response(server, sealed)
    assert sent_back["status"] == "completed"


async def test_items_of_stored_responses_can_be_named() -> None:
    async with served() as server:
        (item,) = (await response(server))["output"]
        conversation_id = await begin(server, user("Hi"), {"id": item["id"]})
        assert (await items_of(server, conversation_id))[1] == item
        body = {"items": [user("Hi"), {"type": "item_reference", "id": "other"}]}
        missing = await server.post(CONVERSATIONS, body)
    assert missing.status_code == 404
    error = missing.json()["error"]
    assert (error["param"], error["message"]) == ("items.1.id", "Item with id 'other' not found.")


METADATA: Final = {str(number): "v" for number in range(17)}
BAD: Final[list[tuple[dict[str, Any], str]]] = [
    ({"unknown": 1}, "unknown"),
    ({"items": [user("a")] * 21}, "items"),
    ({"items": "Hi"}, "items"),
    ({"items": [1]}, "items.0"),
    ({"items": [user("a"), {"type": "mcp_call"}]}, "items.1.type"),
    ({"items": [{"role": "user"}]}, "items.0.content"),
    ({"items": [{"type": "compaction_trigger"}]}, "items.0.type"),
    ({"items": [user("a", id="mine"), user("b", id="mine")]}, "items.1.id"),
    ({"items": [user("a", id="i" * 257)]}, "items.0.id"),
    ({"items": [user("\ud800")]}, "items.0.content"),
]
BAD_METADATA: Final[list[tuple[Any, str]]] = [
    (METADATA, "metadata"),
    ({"k" * 65: "v"}, f"metadata.{'k' * 65}.[key]"),
    ({"k": "v" * 513}, "metadata.k"),
    ({"k": 1}, "metadata.k"),
    ("v", "metadata"),
]


async def test_what_is_wrong_is_named() -> None:
    async with served() as server:
        conversation_id = await begin(server, user("a", id="mine"))
        path = f"{CONVERSATIONS}/{conversation_id}"
        cases: list[tuple[str, Any, str]] = [
            *((CONVERSATIONS, body, param) for body, param in BAD),
            *((f"{path}/items", {"items": []} | body, param) for body, param in BAD),
            *((CONVERSATIONS, {"metadata": given}, param) for given, param in BAD_METADATA),
            *((path, {"metadata": given}, param) for given, param in BAD_METADATA),
            (path, {}, "metadata"),
            (path, {"metadata": {}, "items": []}, "items"),
            (f"{path}/items", {}, "items"),
            (f"{path}/items", {"items": None}, "items"),
            (f"{path}/items", {"items": [user("b"), user("c", id="mine")]}, "items.1.id"),
        ]
        answers = [(await server.post(where, body), param) for where, body, param in cases]
        for name, value in (("include", "a"), ("include[]", "a"), ("limit", 101), ("order", "up")):
            answer = await server.client.get(f"{path}/items", params={name: value})
            answers.append((answer, f"{name}.0" if value == "a" else name))
        assert await texts_of(server, conversation_id) == ["a"]
    found = [
        (answer.text, param)
        for answer, param in answers
        if (answer.status_code, answer.json()["error"]["param"]) != (400, param)
    ]
    assert found == []


async def test_a_conversation_of_one_key_is_not_seen_by_another() -> None:
    async with served(api_keys=SecretStr("mine,yours")) as server:
        server.client.headers["Authorization"] = "Bearer mine"
        conversation_id = await begin(server, user("a", id="first"))
        server.client.headers["Authorization"] = "Bearer yours"
        assert await statuses(server, conversation_id, "first") == {404}
        server.client.headers["Authorization"] = "Bearer mine"
        assert await statuses(server, conversation_id, "first") == {200}


async def test_the_limits_of_stored_responses_are_those_of_conversations() -> None:
    async with served(max_stored_responses=2) as server:
        ids = [await begin(server, user(name)) for name in "abc"]
        found = [await server.client.get(f"{CONVERSATIONS}/{each}") for each in ids]
    assert [each.status_code for each in found] == [404, 200, 200]


async def test_a_full_disk_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise StorageError("responses.sqlite: database or disk is full")

    async with served() as server:
        conversation_id = await begin(server)
        monkeypatch.setattr(ConversationStore, "_use", fail)
        body = {"items": [user("a")]}
        refused = [
            await server.post(CONVERSATIONS, body),
            await server.post(f"{CONVERSATIONS}/{conversation_id}/items", body),
            await server.post("/v1/responses", {"input": "a", "conversation": conversation_id}),
        ]
    for answer in refused:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert caplog.text.count("a conversation is not stored: StorageError (responses.sqlite: ") == 3


async def test_conversations_are_not_listed() -> None:
    async with served() as server:
        plain = await server.client.get(CONVERSATIONS)
    assert (plain.status_code, plain.headers["allow"]) == (405, "POST")
    assert without_ids(plain.json())["error"]["code"] == "method_not_supported"
