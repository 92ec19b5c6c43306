"""Responses that go on from a conversation and add to it: whole, streamed, in the background, over a WebSocket."""

import asyncio
import json
import sqlite3
from typing import Any, Final

import pytest

from app.http.client import ANONYMOUS
from app.storage.disk.database import StorageError
from app.storage.responses.conversations import Addition, ConversationStore
from app.storage.responses.store import ResponseStore, StoredResponse
from app.storage.seal import Sealer
from app.storage.storage import Storage
from tests.support.byte_tokenizers import Bytes
from tests.support.conversations import CONVERSATIONS, begin, items_of, texts_of, user
from tests.support.responses import (
    PATH,
    Thinking,
    call,
    checked_items,
    custom,
    events_in,
    function,
    respond,
    response,
    stream,
)
from tests.support.speaker import Breaking, Served, served, served_endlessly

pytestmark = pytest.mark.anyio

LOCKED: Final = {
    "message": "a response is adding to this conversation; try again when it has ended",
    "type": "invalid_request_error",
    "param": "conversation",
    "code": "conversation_locked",
}
TRIGGER: Final = {"type": "compaction_trigger"}
IMAGE: Final = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}


async def count(server: Served, **fields: Any) -> int:
    answer = await server.post(f"{PATH}/input_tokens", fields)
    assert answer.status_code == 200, answer.text
    num_tokens: int = answer.json()["input_tokens"]
    return num_tokens


async def add(server: Served, conversation_id: str, text: str) -> None:
    """Add a message, which shows that no response has its turn."""
    body = {"items": [user(text)]}
    added = await server.post(f"{CONVERSATIONS}/{conversation_id}/items", body)
    assert added.status_code == 200, added.text


async def until_finished(server: Served, response_id: str) -> dict[str, Any]:
    """Wait for the work on responses in the background, and return one of them."""
    tasks = [each.task for each in server.service.detached.values()]
    await asyncio.gather(*tasks, return_exceptions=True)
    found: dict[str, Any] = (await server.client.get(f"{PATH}/{response_id}")).json()
    return found


async def test_a_response_goes_on_from_a_conversation_and_adds_to_it() -> None:
    async with served(b"Hello!") as server:
        conversation_id = await begin(server, user("Hi"))
        counted = await count(server, input="One", conversation=conversation_id)
        assert await texts_of(server, conversation_id) == ["Hi"]
        first = await response(server, "One", conversation=conversation_id)
        second = await response(server, "Two", conversation={"id": conversation_id})
        events = await stream(server, "Three", conversation=conversation_id, store=False)
        items = await items_of(server, conversation_id)
        sent = await count(server, input=items)
        path = f"{PATH}/{second['id']}/input_items?order=asc"
        listed = checked_items((await server.client.get(path)).json())
        assert (await server.client.get(f"{PATH}/{first['id']}")).json() == first
        assert (
            await server.client.get(f"{PATH}/{events[-1]['response']['id']}")
        ).status_code == 404
        # Only the conversation itself, without any input.
        assert await count(server, conversation=conversation_id) == sent
    for answer in (first, second, events[0]["response"], events[-1]["response"]):
        assert answer["conversation"] == {"id": conversation_id}
    texts = [item["content"][0]["text"] for item in items]
    assert texts == ["Hi", "One", "Hello!", "Two", "Hello!", "Three", "Hello!"]
    assert first["usage"]["input_tokens"] == counted
    # With the same ids wherever they are listed.
    assert listed == items[:4]
    assert items[4] == second["output"][0]


async def test_a_response_on_its_own_has_no_conversation() -> None:
    async with served() as server:
        assert (await response(server))["conversation"] is None


async def test_calls_reasoning_and_tools_are_part_of_it() -> None:
    said = f"<think>hm</think>Well. {call('add', a=1)}{call('patch', input='x')}"
    joined = {"type": "additional_tools", "role": "developer", "tools": [custom(), function()]}
    async with served(said.encode(), tokenizer=Thinking()) as server:
        conversation_id = await begin(server, joined)
        first = await response(server, "Hi", conversation=conversation_id)
        outputs = [
            {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "1"}
            for item in first["output"][2:]
        ]
        await response(server, outputs, conversation=conversation_id)
        kinds = [item["type"] for item in await items_of(server, conversation_id)]
    output = ["reasoning", "message", "function_call", "custom_tool_call"]
    outputs_of = ["function_call_output", "custom_tool_call_output"]
    assert kinds == ["additional_tools", "message", *output, *outputs_of, *output]


async def test_tools_of_a_conversation_can_be_chosen() -> None:
    joined = {"type": "additional_tools", "role": "developer", "tools": [custom(), function()]}
    async with served(call("patch", input="x").encode(), tokenizer=Bytes()) as server:
        conversation_id = await begin(server, joined)
        chosen = {"type": "custom", "name": "patch"}
        fields = {"tool_choice": chosen, "tools": [{"type": "web_search"}]}
        answer = await response(server, conversation=conversation_id, **fields)
    assert answer["output"][0]["name"] == "patch"


async def test_an_item_that_cannot_be_used_is_deleted() -> None:
    async with served() as server:
        conversation_id = await begin(server, {"role": "user", "content": [IMAGE], "id": "image"})
        refused = await respond(server, "What is it?", conversation=conversation_id)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "conversation")
        await server.client.delete(f"{CONVERSATIONS}/{conversation_id}/items/image")
        await response(server, "What is it?", conversation=conversation_id)
        assert await texts_of(server, conversation_id) == ["What is it?", "Hello!"]


async def test_an_id_that_a_client_repeats_is_in_the_conversation_once() -> None:
    async with served() as server:
        conversation_id = await begin(server, user("a", id="mine"))
        await response(server, [user("b", id="mine")], conversation=conversation_id)
        items = await items_of(server, conversation_id)
    assert [item["content"][0]["text"] for item in items] == ["a", "b", "Hello!"]
    assert items[0]["id"] == "mine" != items[1]["id"]


async def test_a_summary_stands_for_what_was_before() -> None:
    told = {"role": "developer", "content": "Be kind.", "id": "told"}
    async with served(b"They greet.") as server:
        called = {"type": "function_call", "call_id": "1", "name": "system"}
        conversation_id = await begin(server, told, user("Hi" * 99, id="greeting"), called)
        (summary,) = (await response(server, [TRIGGER], conversation=conversation_id))["output"]
        counted = await count(server, input="And?", conversation=conversation_id)
        assert counted == await count(server, input=[told, summary, user("And?")])
        # Also an id of an item that it stands for is that of another.
        await response(server, [user("And?", id="greeting")], conversation=conversation_id)
        kinds = [item["type"] for item in await items_of(server, conversation_id)]
    assert kinds == ["message", "message", "function_call", "compaction", "message", "message"]


async def test_a_conversation_is_compacted_in_itself_only() -> None:
    async with served() as server:
        conversation_id = await begin(server, user("Hi"))
        body = {"input": "Hi", "conversation": conversation_id}
        refused = await server.post(f"{PATH}/compact", body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "conversation")


@pytest.mark.parametrize(
    ("fields", "status", "param", "says"),
    [
        ({"previous_response_id": "resp_1"}, 400, "conversation", "previous_response_id"),
        ({"conversation": "conv_other"}, 404, "conversation", "'conv_other' not found"),
        ({"conversation": "other"}, 400, "conversation", "conv_"),
        ({"conversation": 1}, 400, "conversation", "string"),
        ({"conversation": {"id": 1}}, 400, "conversation.id", "string"),
        ({"conversation": {}}, 400, "conversation.id", "required"),
        ({"input": []}, 400, "input", "nothing to respond to"),
        ({"tool_choice": "required"}, 400, "tool_choice", "needs a tool"),
        ({"tools": [{"type": "web_search"}]}, 400, "tools", "pass a function"),
    ],
)
@pytest.mark.parametrize("path", [PATH, f"{PATH}/input_tokens"])
async def test_what_is_wrong_is_named(
    path: str, fields: dict[str, Any], status: int, param: str, says: str
) -> None:
    async with served() as server:
        conversation_id = await begin(server)
        body = {"input": "Hi", "conversation": conversation_id} | fields
        for _ in range(2):
            refused = await server.post(path, body)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (status, param)
            assert says in error["message"]
        assert (await response(server, conversation=conversation_id))["status"] == "completed"


async def test_what_cannot_be_continued_is_said_of_the_conversation() -> None:
    async with served() as server:
        sealed = {"type": "reasoning", "summary": [], "encrypted_content": "forged"}
        conversation_id = await begin(server, sealed)
        forged = await respond(server, conversation=conversation_id)
        many = await begin(server, *[user("")] * 20)
        refused = await respond(server, [user("")] * 8190, conversation=many)
        long = await begin(server, user("y" * 900))
        object.__setattr__(server.service.settings, "max_body_bytes", 900)
        bounded = await respond(server, conversation=long)
    errors = [answer.json()["error"] for answer in (forged, refused, bounded)]
    assert [error["param"] for error in errors] == ["conversation"] * 3
    assert errors[0]["code"] == "invalid_encrypted_content"
    assert "more than 8192 items" in errors[1]["message"]
    assert "longer than 900 characters (MLX_SERVER_MAX_BODY_BYTES)" in errors[2]["message"]


async def test_a_conversation_of_the_most_items_is_summarized_and_goes_on() -> None:
    async with served(b"So.", num_blocks=4096) as server:
        conversation_id = await begin(server)
        items = {str(n): json.dumps(user("", type="message", id=str(n))) for n in range(8191)}
        conversations = server.service.storage.responses.conversations
        conversations.add(ANONYMOUS.key_digest, conversation_id, items)
        await response(server, conversation=conversation_id)
        refused = await respond(server, conversation=conversation_id)
        await response(server, [TRIGGER], conversation=conversation_id)
        await response(server, conversation=conversation_id)
    error = refused.json()["error"]
    assert (error["param"], refused.status_code) == ("conversation", 400)
    assert "more than 8192 items" in error["message"]


async def test_a_conversation_of_the_most_characters_is_summarized_again_and_again() -> None:
    async with served(b"So.") as server:
        object.__setattr__(server.service.settings, "max_body_bytes", 1200)
        conversation_id = await begin(server, user("y" * 900))
        for _ in range(3):
            while (answer := await respond(server, conversation=conversation_id)).is_success:
                pass
            assert "longer than 1200 characters" in answer.json()["error"]["message"]
            await response(server, [TRIGGER], conversation=conversation_id)
        # The limit is of what is read: the conversation has more.
        assert len(json.dumps(await items_of(server, conversation_id, limit=100))) > 2000


async def test_a_conversation_of_too_many_bytes_goes_on_once_items_are_deleted() -> None:
    async with served(max_stored_mib=1) as server:
        conversation_id = await begin(server)
        conversations = server.service.storage.responses.conversations
        turn = conversations.turns.take(ANONYMOUS.key_digest, conversation_id)
        large = json.dumps(user("y" * (1 << 20), type="message", id="large"))
        conversations.finish(Addition(turn, {"large": large}))
        refused = await respond(server, conversation=conversation_id)
        await server.client.delete(f"{CONVERSATIONS}/{conversation_id}/items/large")
        await response(server, conversation=conversation_id)
    error = refused.json()["error"]
    assert (error["param"], refused.status_code) == ("conversation", 400)
    assert "at most 1048576 bytes (MLX_SERVER_MAX_STORED_MIB)" in error["message"]


@pytest.mark.parametrize(
    "fields", [{"generate": False}, {"prompt_cache_options": {"prewarm": True}}]
)
@pytest.mark.parametrize("store", [True, False])
async def test_what_only_fills_the_cache_adds_nothing(store: bool, fields: dict[str, Any]) -> None:
    async with served() as server:
        conversation_id = await begin(server, user("Hi"))
        warmed = await response(server, "One", conversation=conversation_id, store=store, **fields)
        assert await texts_of(server, conversation_id) == ["Hi"]
        counted = await count(server, input="One", conversation=conversation_id)
    assert (warmed["output"], warmed["usage"]["input_tokens"]) == ([], counted)


# How a response ends


async def test_a_response_that_is_cut_adds_what_it_has() -> None:
    async with served(b"Hello!") as server:
        conversation_id = await begin(server)
        cut = await response(server, conversation=conversation_id, max_output_tokens=1)
        items = await items_of(server, conversation_id)
    assert cut["status"] == "incomplete"
    assert items[1] == cut["output"][0]


@pytest.mark.parametrize("store", [True, False])
async def test_a_response_that_fails_adds_nothing(store: bool) -> None:
    async with served(b"ok", runner=Breaking) as server:
        conversation_id = await begin(server, user("Hi"))
        fields: dict[str, Any] = {"conversation": conversation_id, "store": store}
        failed = (await stream(server, **fields))[-1]
        assert failed["type"] == "response.failed"
        assert (await respond(server, **fields)).status_code == 500
        assert await texts_of(server, conversation_id) == ["Hi"]
        # It is over for others, too.
        assert (await stream(server, **fields))[-1]["type"] == "response.failed"


async def test_a_response_in_the_background_adds_when_it_is_complete() -> None:
    async with served(b"Hello!", is_gated=True) as server:
        conversation_id = await begin(server)
        begun = await response(server, "One", conversation=conversation_id, background=True)
        assert begun["conversation"] == {"id": conversation_id}
        assert await texts_of(server, conversation_id) == []
        server.gate.open()
        done = await until_finished(server, begun["id"])
        path = f"{PATH}/{begun['id']}/input_items"
        given = checked_items((await server.client.get(path)).json())
        items = await items_of(server, conversation_id)
        await stream(server, "Two", conversation=conversation_id, background=True)
        texts = await texts_of(server, conversation_id)
    assert [*given, *done["output"]] == items
    assert texts == ["One", "Hello!", "Two", "Hello!"]


@pytest.mark.parametrize(("method", "path"), [("POST", "/cancel"), ("DELETE", "")])
async def test_a_response_that_is_cancelled_or_deleted_adds_nothing(method: str, path: str) -> None:
    async with served_endlessly() as server:
        conversation_id = await begin(server, user("Hi"))
        begun = await response(server, conversation=conversation_id, background=True)
        ended = await server.client.request(method, f"{PATH}/{begun['id']}{path}")
        assert ended.status_code == 200
        await add(server, conversation_id, "Bye")
        assert await texts_of(server, conversation_id) == ["Hi", "Bye"]


async def test_a_client_that_leaves_adds_nothing() -> None:
    async with served_endlessly() as server:
        conversation_id = await begin(server, user("Hi"))
        request = asyncio.create_task(respond(server, conversation=conversation_id))
        await asyncio.to_thread(server.gate.reached.wait)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await add(server, conversation_id, "Bye")
        assert await texts_of(server, conversation_id) == ["Hi", "Bye"]


@pytest.mark.parametrize("store", [True, False])
async def test_a_response_fails_whose_items_cannot_be_stored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, store: bool
) -> None:
    """One on its own is returned all the same; here the next one would miss a turn."""

    def fail(*_: object) -> None:
        raise StorageError("responses.sqlite: database or disk is full")

    async with served() as server:
        conversation_id = await begin(server, user("Hi"))
        fields: dict[str, Any] = {"conversation": conversation_id, "store": store}
        with monkeypatch.context() as patched:
            patched.setattr(ConversationStore, "finish_in", fail)
            whole = await respond(server, **fields)
            streamed = await stream(server, **fields)
            cut = await stream(server, max_output_tokens=1, **fields)
        assert await texts_of(server, conversation_id) == ["Hi"]
        await response(server, "Two", **fields)
        assert await texts_of(server, conversation_id) == ["Hi", "Two", "Hello!"]
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "unavailable")
    for events in (streamed, cut):
        kinds = [event["type"] for event in events[-2:]]
        assert kinds == ["response.output_item.done", "response.failed"]
        failed = events[-1]["response"]
        assert failed["error"]["message"] == "conversations cannot be stored at present"
        assert failed["completed_at"] is failed["incomplete_details"] is None
    assert "a conversation is not stored: " in caplog.text


async def test_a_response_in_the_background_whose_items_cannot_be_stored_has_one_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finish_in = ConversationStore.finish_in

    def fail(store: ConversationStore, database: sqlite3.Connection, addition: Addition) -> None:
        if addition.items:
            raise StorageError("responses.sqlite: database or disk is full")
        finish_in(store, database, addition)

    monkeypatch.setattr(ConversationStore, "finish_in", fail)
    async with served() as server:
        conversation_id = await begin(server)
        fields: dict[str, Any] = {"conversation": conversation_id, "background": True}
        begun = await response(server, **fields)
        assert (await until_finished(server, begun["id"]))["status"] == "failed"
        events = await stream(server, **fields)
        path = f"{PATH}/{events[0]['response']['id']}"
        again = await server.client.get(path, params={"stream": True})
        assert (await server.client.get(path)).json() == events[-1]["response"]
        await add(server, conversation_id, "Hi")
    ends = [event["type"] for event in events if "response" in event][3:]
    assert ends == ["response.failed"]
    assert events_in(again.text) == events


# One at a time


async def test_one_response_at_a_time_goes_on_from_a_conversation() -> None:
    async with served(b"Hello!", is_gated=True) as server:
        conversation_id = await begin(server, user("Hi", id="first"))
        path = f"{CONVERSATIONS}/{conversation_id}"
        begun = await response(server, "One", conversation=conversation_id, background=True)
        locked = [
            await respond(server, "Two", conversation=conversation_id),
            await respond(server, "Two", conversation=conversation_id, stream=True),
            await server.post(f"{path}/items", {"items": [user("Two")]}),
            await server.client.delete(f"{path}/items/first"),
        ]
        # These change no item.
        assert await count(server, input="Two", conversation=conversation_id)
        assert (await server.post(path, {"metadata": {"k": "v"}})).status_code == 200
        server.gate.open()
        assert (await until_finished(server, begun["id"]))["status"] == "completed"
        assert await texts_of(server, conversation_id) == ["Hi", "One", "Hello!"]
        assert (await server.client.delete(f"{path}/items/first")).status_code == 200
    assert [answer.status_code for answer in locked] == [400] * 4
    named = [LOCKED, LOCKED, *[LOCKED | {"param": "conversation_id"}] * 2]
    assert [answer.json()["error"] for answer in locked] == named


async def test_of_many_responses_at_once_each_adds_or_is_refused() -> None:
    async with served(b"Hello!") as server:
        conversation_id = await begin(server)
        asked = [respond(server, str(n), conversation=conversation_id) for n in range(8)]
        statuses = [answer.status_code for answer in await asyncio.gather(*asked)]
        texts = await texts_of(server, conversation_id)
    added = [str(n) for n, status in enumerate(statuses) if status == 200]
    assert set(statuses) <= {200, 400}
    assert added
    assert sorted(texts) == sorted([*added, *["Hello!"] * len(added)])
    assert texts[1::2] == ["Hello!"] * len(added)


async def test_what_comes_right_after_the_last_event_is_served() -> None:
    """The turn ends with what is stored, and not when the client has read all."""
    async with served(b"Hello!") as server:
        conversation_id = await begin(server)
        put = ResponseStore.put
        answers: list[int] = []

        def put_and_ask(
            store: ResponseStore, owner: str, name: str, stored: StoredResponse
        ) -> None:
            put(store, owner, name, stored)
            store.conversations.turns.take(owner, conversation_id).close()
            answers.append(1)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(ResponseStore, "put", put_and_ask)
            await stream(server, conversation=conversation_id)
            await response(server, conversation=conversation_id)
    assert answers == [1, 1]


async def test_a_conversation_that_is_deleted_meanwhile_is_gone() -> None:
    async with served(b"Hello!", is_gated=True) as server:
        conversation_id = await begin(server)
        path = f"{CONVERSATIONS}/{conversation_id}"
        begun = await response(server, conversation=conversation_id, background=True)
        assert (await server.client.delete(path)).status_code == 200
        server.gate.open()
        done = await until_finished(server, begun["id"])
        assert (await server.client.get(path)).status_code == 404
    assert (done["status"], done["conversation"]) == ("completed", {"id": conversation_id})


async def test_a_deleted_response_leaves_its_items_in_the_conversation() -> None:
    async with served() as server:
        conversation_id = await begin(server)
        first = await response(server, "One", conversation=conversation_id)
        await server.client.delete(f"{PATH}/{first['id']}")
        assert await texts_of(server, conversation_id) == ["One", "Hello!"]


async def test_a_response_goes_on_from_one_of_a_conversation_without_adding_to_it() -> None:
    async with served() as server:
        conversation_id = await begin(server, user("Hi"))
        first = await response(server, "One", conversation=conversation_id)
        texts = await texts_of(server, conversation_id)
        aside = await response(server, "Two", previous_response_id=first["id"])
        assert aside["conversation"] is None
        assert await texts_of(server, conversation_id) == texts
        assert aside["usage"]["input_tokens"] == await count(
            server, input="Two", conversation=conversation_id
        )


async def test_reasoning_with_its_text_outlives_the_key() -> None:
    async with served(b"<think>hm</think>4", tokenizer=Thinking()) as server:
        conversation_id = await begin(server)
        include = ["reasoning.encrypted_content"]
        await response(server, conversation=conversation_id, include=include)
        storage = Storage(server.service.storage.responses, Sealer(b"another key"))
        object.__setattr__(server.service, "storage", storage)
        assert (await respond(server, conversation=conversation_id)).status_code == 200
