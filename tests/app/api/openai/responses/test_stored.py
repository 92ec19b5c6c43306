"""Responses that are kept: read, listed, continued and deleted by their own client only."""

from typing import Any, Final

import httpx
import pytest
from pydantic import SecretStr

from app.storage.disk.database import StorageError
from app.storage.responses.store import ResponseStore
from app.storage.seal import Sealer
from app.storage.storage import Storage
from tests.support.byte_tokenizers import Bytes
from tests.support.responses import (
    PATH,
    Thinking,
    call,
    checked_items,
    checked_response,
    custom,
    function,
    respond,
    response,
    stream,
    without_ids,
)
from tests.support.speaker import Breaking, Served, served

pytestmark = pytest.mark.anyio

KEYS: Final = SecretStr("mine,yours")


async def get(server: Served, response_id: str, **params: Any) -> httpx.Response:
    return await server.client.get(f"{PATH}/{response_id}", params=params)


async def input_items(server: Served, response_id: str, **params: Any) -> list[dict[str, Any]]:
    answer = await server.client.get(f"{PATH}/{response_id}/input_items", params=params)
    assert answer.status_code == 200, answer.text
    return checked_items(answer.json())


def as_client(server: Served, key: str) -> None:
    server.client.headers["Authorization"] = f"Bearer {key}"


async def test_a_response_is_kept_whole_streamed_cut_or_failed() -> None:
    async with served(b"Hello!") as server:
        whole = await response(server)
        streamed = (await stream(server))[-1]["response"]
        cut = await response(server, max_output_tokens=1)
        for each in (whole, streamed, cut):
            found = await get(server, each["id"])
            assert checked_response(found.json()) == each
    async with served(b"ok", runner=Breaking) as server:
        failed = (await stream(server))[-1]["response"]
        assert (await get(server, failed["id"])).json() == failed


async def test_the_tokens_of_a_response_that_continues_another_are_counted() -> None:
    async with served(b"Hello!") as server:
        first = await response(server)
        body = {"input": "And?", "previous_response_id": first["id"], "instructions": "Be brief."}
        counted = await server.post(f"{PATH}/input_tokens", body)
        second = await response(server, **body)
        refused = await server.post(f"{PATH}/input_tokens", body | {"tool_choice": "required"})
    num_tokens = second["usage"]["input_tokens"]
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": num_tokens}
    assert refused.json()["error"]["param"] == "tool_choice"


async def test_what_is_not_to_be_kept_is_not() -> None:
    async with served() as server:
        answer = await response(server, store=False)
        missing = await get(server, answer["id"])
    assert missing.status_code == 404
    error = missing.json()["error"]
    assert (error["code"], error["type"]) == ("not_found", "invalid_request_error")


async def test_a_deleted_response_is_gone() -> None:
    async with served() as server:
        path = f"{PATH}/{(await response(server))['id']}"
        deleted = await server.client.delete(path)
        again = await server.client.delete(path)
        found = await server.client.get(path)
    assert deleted.json() == {
        "id": path.rpartition("/")[2],
        "object": "response",
        "deleted": True,
    }
    assert [again.status_code, found.status_code] == [404, 404]


async def test_a_response_of_one_key_is_not_seen_by_another() -> None:
    async with served(b"<think>a</think>b", tokenizer=Thinking(), api_keys=KEYS) as server:
        as_client(server, "mine")
        mine = await response(server)
        path = f"{PATH}/{mine['id']}"
        as_client(server, "yours")
        others = [
            await server.client.get(path),
            await server.client.get(f"{path}/input_items"),
            await server.client.post(f"{path}/cancel"),
            await server.client.delete(path),
        ]
        continued = await respond(server, previous_response_id=mine["id"])
        referred = await respond(server, [{"id": mine["output"][0]["id"]}])
        as_client(server, "mine")
        assert (await server.client.get(path)).status_code == 200
    assert [other.status_code for other in others] == [404] * 4
    item_id = mine["output"][0]["id"]
    assert (continued.status_code, continued.json()["error"]) == (
        400,
        {
            "message": f"Previous response with id '{mine['id']}' not found.",
            "type": "invalid_request_error",
            "param": "previous_response_id",
            "code": "previous_response_not_found",
        },
    )
    assert (referred.status_code, referred.json()["error"]) == (
        404,
        {
            "message": f"Item with id '{item_id}' not found.",
            "type": "invalid_request_error",
            "param": "input",
            "code": None,
        },
    )


async def test_the_oldest_are_dropped() -> None:
    async with served(max_stored_responses=2) as server:
        ids = [(await response(server))["id"] for _ in range(3)]
        statuses = [(await get(server, each)).status_code for each in ids]
    assert statuses == [404, 200, 200]


async def test_a_stored_response_is_not_streamed() -> None:
    async with served() as server:
        answer = await get(server, (await response(server))["id"], stream=True)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")


async def test_a_full_disk_takes_no_response_from_its_client(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise StorageError("responses.sqlite: database or disk is full")

    monkeypatch.setattr(ResponseStore, "put", fail)
    async with served() as server:
        assert (await response(server))["status"] == "completed"
        assert (await stream(server))[-1]["type"] == "response.completed"
        refused = await respond(server, background=True)
        assert await server.num_unfinished() == 0
    assert refused.status_code == 503
    reason = "StorageError (responses.sqlite: database or disk is full) at "
    assert caplog.text.count(f"a response is not stored: {reason}") == 3


# Continued


async def test_a_response_goes_on_from_the_one_before_with_all_its_items() -> None:
    answer = f"<think>hm</think>Well. {call('add', a=1)}{call('patch', input='x')}"
    tools = [function("add"), custom()]
    async with served(answer.encode(), tokenizer=Thinking()) as server:
        first = await response(server, "Hi", tools=tools)
        outputs = [
            {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "1"}
            for item in first["output"][2:]
        ]
        second = await response(
            server,
            outputs,
            previous_response_id=first["id"],
            tools=tools,
            include=["reasoning.encrypted_content"],
            store=True,
        )
        items = await input_items(server, second["id"], order="asc")
        third = await response(server, [], previous_response_id=second["id"], tools=tools)
        again = await response(server, items, tools=tools)
    kinds = ["message", "reasoning", "message", "function_call", "custom_tool_call"]
    kinds += ["function_call_output", "custom_tool_call_output"]
    assert [item["type"] for item in items] == kinds
    assert [item["id"] for item in items[1:5]] == [item["id"] for item in first["output"]]
    assert second["previous_response_id"] == first["id"]
    # The same prompt, whether the items come out of the store or from the client.
    assert again["usage"]["input_tokens"] == second["usage"]["input_tokens"]
    assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]


async def test_tools_that_joined_stay_for_what_goes_on() -> None:
    item = {"type": "additional_tools", "role": "developer", "tools": [custom(), function()]}
    async with served(call("patch", input="x").encode(), tokenizer=Bytes()) as server:
        first = await response(server, [item, {"role": "user", "content": "Hi"}])
        second = await response(server, "Hi", previous_response_id=first["id"])
        items = await input_items(server, second["id"], order="asc")
    assert first["output"][0]["type"] == second["output"][0]["type"] == "custom_tool_call"
    assert items[0]["id"].startswith("at_")
    assert [tool["name"] for tool in items[0]["tools"]] == ["patch", "add"]


async def test_tools_of_an_earlier_response_can_be_chosen() -> None:
    item = {"type": "additional_tools", "role": "developer", "tools": [custom(), function()]}
    chosen = {"type": "custom", "name": "patch"}
    async with served(call("patch", input="x").encode(), tokenizer=Bytes()) as server:
        first = await response(server, [item, {"role": "user", "content": "Hi"}])
        for choice in ("required", chosen):
            later = await response(server, previous_response_id=first["id"], tool_choice=choice)
            assert later["output"][0]["name"] == "patch"
        bare = await response(server)
        refused = await respond(server, previous_response_id=bare["id"], tool_choice=chosen)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], error["message"]) == ("tool_choice", "there is no tool named 'patch'")


async def test_the_prompt_of_a_turn_begins_with_the_one_before() -> None:
    async with served(b"Yes, it is. " * 4) as server:
        first = await response(server, "x" * 100)
        second = await response(server, "And now?", previous_response_id=first["id"])
    shared = first["usage"]["input_tokens"]
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= shared // 32 * 32


async def test_instructions_are_of_one_response_only() -> None:
    async with served() as server:
        first = await response(server, "Hi", instructions="Be brief.")
        second = await response(server, "Hi", previous_response_id=first["id"])
        assert second["instructions"] is None
        items = await input_items(server, second["id"])
    assert {item["role"] for item in items} == {"user", "assistant"}


async def test_a_deleted_response_leaves_those_that_went_on_from_it() -> None:
    async with served() as server:
        first = await response(server)
        second = await response(server, previous_response_id=first["id"])
        await server.client.delete(f"{PATH}/{first['id']}")
        third = await response(server, previous_response_id=second["id"])
        assert len(await input_items(server, third["id"])) == 5


async def test_an_item_can_be_named_instead_of_sent() -> None:
    async with served(b"Hello!") as server:
        (item,) = (await response(server))["output"]
        sent = await response(server, [item])
        for reference in ({"type": "item_reference", "id": item["id"]}, {"id": item["id"]}):
            named = await response(server, [reference])
            assert named["usage"]["input_tokens"] == sent["usage"]["input_tokens"]
            (listed,) = await input_items(server, named["id"])
            assert listed == item


async def test_what_is_referred_to_is_bounded_and_each_item_read_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    item, reads = ResponseStore.item, []

    def noticed(store: ResponseStore, owner: str, name: str) -> str | None:
        reads.append(name)
        return item(store, owner, name)

    monkeypatch.setattr(ResponseStore, "item", noticed)
    async with served(b"x" * 600, num_blocks=1024, max_body_bytes=2200) as server:
        first = await response(server, "y" * 900)
        reference = {"id": first["output"][0]["id"]}
        twice = await respond(server, [reference] * 2)
        thrice = await respond(server, [reference] * 3)
        second = await respond(server, "y" * 900, previous_response_id=first["id"])
        third = await respond(server, previous_response_id=second.json()["id"])
    assert (twice.status_code, second.status_code) == (200, 200)
    assert reads == [reference["id"]] * 2
    for refused, param in ((thrice, "input.2.id"), (third, "previous_response_id")):
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, param)
        assert "longer than 2200 characters" in error["message"]


async def test_a_request_has_no_more_items_with_those_of_an_earlier_response() -> None:
    async with served(num_blocks=1 << 13) as server:
        first = await response(server, [{"role": "user", "content": ""}] * 100)
        items = [{"role": "user", "content": ""}] * (8192 - 100)
        refused = await respond(server, items, previous_response_id=first["id"])
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "previous_response_id")
    assert "more than 8192 items" in error["message"]


async def test_sealed_reasoning_comes_back_as_it_was() -> None:
    async with served(b"<think>hm</think>4", tokenizer=Thinking()) as server:
        include = ["reasoning.encrypted_content"]
        events = await stream(server, include=include, store=False, reasoning={"summary": "auto"})
        (reasoning, _) = events[-1]["response"]["output"]
        assert events[2]["item"].keys() == {"type", "id", "status", "summary"}
        sealed = reasoning["encrypted_content"]
        assert server.service.sealer.unseal("reasoning", sealed) == "hm"
        kept = {"type": "reasoning", "id": "rs_x", "summary": [], "encrypted_content": sealed}
        items = [{"role": "user", "content": "Hi"}, kept]
        back = await response(server, items)
        (forged, *_) = [await respond(server, [kept | {"encrypted_content": sealed[:-8]}])]
        listed = await input_items(server, back["id"], order="asc")
    assert listed[1]["encrypted_content"] == sealed
    assert forged.status_code == 400
    error = forged.json()["error"]
    assert error["param"] == "input.0.encrypted_content"
    assert error["code"] == "invalid_encrypted_content"


async def test_reasoning_that_is_longer_unsealed_than_any_body_is_refused() -> None:
    async with served() as server:
        sealed = server.service.sealer.seal("reasoning", " " * (3 << 20))
        item = {"type": "reasoning", "summary": [], "encrypted_content": sealed}
        refused = await respond(server, [item, item])
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "input"
    assert "its reasoning is longer than 4194304" in refused.json()["error"]["message"]


async def test_sealed_reasoning_in_the_store_outlives_its_key_if_its_text_is_there() -> None:
    async with served(b"<think>hm</think>4", tokenizer=Thinking()) as server:
        first = await response(server, include=["reasoning.encrypted_content"])
        sealed = first["output"][0]["encrypted_content"]
        bare = [{"type": "reasoning", "summary": [], "encrypted_content": sealed}]
        second = await response(server, bare)
        storage = Storage(server.service.storage.responses, Sealer(b"another key"))
        object.__setattr__(server.service, "storage", storage)
        assert (await respond(server, previous_response_id=first["id"])).status_code == 200
        lost = await respond(server, previous_response_id=second["id"])
    error = lost.json()["error"]
    assert (error["param"], error["code"]) == ("previous_response_id", "invalid_encrypted_content")


async def test_a_call_that_no_request_may_have_is_not_continued() -> None:
    name = "n" * 257
    async with served(call(name).encode()) as server:
        first = await response(server, tools=[function()])
        (item,) = first["output"]
        assert item["name"] == name
        continued = await respond(server, previous_response_id=first["id"])
        named = await respond(server, [{"role": "user", "content": "Hi"}, {"id": item["id"]}])
    for answer, param in ((continued, "previous_response_id"), (named, "input.1.id")):
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert "continued: name: " in answer.json()["error"]["message"]


# Listed


async def test_the_items_of_an_input_are_listed_in_pages() -> None:
    texts = [str(number) for number in range(5)]
    items: list[dict[str, Any]] = [{"role": "user", "content": text} for text in texts]
    items[1] = {"role": "developer", "content": "1", "id": "mine"}
    async with served() as server:
        items[0] = {"role": "system", "content": "0"}
        answer = await response(server, [items[0], items[1]])
        path = f"{PATH}/{answer['id']}/input_items"
        last_first = (await server.client.get(path)).json()
        page = (await server.client.get(path, params={"limit": 1, "order": "asc"})).json()
        rest = (
            await server.client.get(path, params={"after": page["last_id"], "order": "asc"})
        ).json()
        empty = (await server.client.get(path, params={"after": "mine", "order": "asc"})).json()
        missing = await server.client.get(path, params={"after": "nothing"})
        wrong = await server.client.get(path, params={"limit": 0})
    assert [item["content"][0]["text"] for item in last_first["data"]] == ["1", "0"]
    assert (page["has_more"], rest["has_more"]) == (True, False)
    assert [item["id"] for item in rest["data"]] == ["mine"] == [rest["first_id"]]
    assert without_ids(empty) == {
        "object": "list",
        "data": [],
        "first_id": "",
        "last_id": "",
        "has_more": False,
    }
    assert missing.json()["error"]["param"] == "after"
    assert wrong.json()["error"]["param"] == "limit"


async def test_pages_end_where_a_client_repeats_ids() -> None:
    items = [{"role": "user", "content": text, "id": "mine"} for text in "abc"]
    async with served() as server:
        answer = await response(server, items)
        ids = [item["id"] for item in await input_items(server, answer["id"], order="asc")]
        rest = await input_items(server, answer["id"], order="asc", after=ids[1])
    assert (ids[0], len(set(ids))) == ("mine", 3)
    assert [item["content"][0]["text"] for item in rest] == ["c"]


async def test_responses_are_not_listed() -> None:
    async with served() as server:
        plain = await server.client.get(PATH)
    assert (plain.status_code, plain.headers["allow"]) == (405, "POST")
    assert plain.json()["error"]["code"] == "method_not_supported"
