"""Responses in the background whose events clients follow, also after a lost connection."""

import asyncio
from typing import Any

import anyio.lowlevel
import httpx
import pytest

from app.storage.responses.store import ResponseStore, StoredResponse
from app.storage.storage import Storage
from tests.support.responses import PATH, events_in, respond, stream, unwritable
from tests.support.speaker import Breaking, Served, served, served_endlessly

pytestmark = pytest.mark.anyio


async def followed(server: Served, response_id: str, **query: Any) -> httpx.Response:
    return await server.client.get(f"{PATH}/{response_id}", params={"stream": True} | query)


async def begun(server: Served) -> str:
    """Return the id of the only response, when its first token waits."""
    await asyncio.to_thread(server.gate.reached.wait)
    # The engine may be faster than the store.
    while not (found := [*server.service.detached]):
        await anyio.lowlevel.checkpoint()
    return found[0]


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


async def test_a_response_in_the_background_is_streamed() -> None:
    async with served(b"Hello!") as server:
        events = await stream(server, background=True)
        plain = await stream(server)
        again = await followed(server, events[0]["response"]["id"])
    assert kinds(events) == ["created", "queued", *kinds(plain)[1:]]
    assert [event["response"]["status"] for event in events[:3]] == 2 * ["queued"] + ["in_progress"]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Hello!"
    assert events_in(again.text) == events


@pytest.mark.parametrize("kind", ["response.created", "response.completed"])
async def test_an_event_that_cannot_be_written_fails_it(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    unwritable(monkeypatch, kind)
    async with served(b"ok") as server:
        failed = (await stream(server, background=True))[-1]
        stored = await server.client.get(f"{PATH}/{failed['response']['id']}")
    assert failed["type"] == "response.failed"
    assert stored.json() == failed["response"]


@pytest.mark.parametrize("after", [0, 5, 1000])
async def test_it_is_resumed_behind_an_event(after: int) -> None:
    async with served(b"Hello!") as server:
        answer = await respond(server, background=True, stream=True)
        response_id = events_in(answer.text)[0]["response"]["id"]
        rest = await followed(server, response_id, starting_after=after)
    frames = answer.text.split("\n\n")
    assert rest.text.split("\n\n") == (frames[after + 1 :] if after < len(frames) else [""])


async def test_it_goes_on_when_its_client_leaves_and_is_followed_by_others() -> None:
    async with served(b"Hello!", is_gated=True) as server:
        creating = asyncio.create_task(respond(server, background=True, stream=True))
        response_id = await begun(server)
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
        following = [
            asyncio.create_task(followed(server, response_id, starting_after=after))
            for after in (0, 2)
        ]
        await asyncio.sleep(0)
        server.gate.open()
        first, second = [(await each).text for each in following]
        whole = events_in((await followed(server, response_id)).text)
    assert kinds(whole)[-1] == "completed"
    assert first.endswith(second)
    assert len(whole) == len(first.split("\n\n")) == len(second.split("\n\n")) + 2


async def test_a_failure_is_the_last_event() -> None:
    async with served(b"ok", runner=Breaking) as server:
        events = await stream(server, background=True)
        again = await followed(server, events[0]["response"]["id"])
    assert kinds(events)[-1] == "failed"
    assert events_in(again.text) == events


async def test_the_events_of_a_cancelled_response_end() -> None:
    async with served_endlessly() as server:
        creating = asyncio.create_task(respond(server, background=True, stream=True))
        response_id = await begun(server)
        await server.client.post(f"{PATH}/{response_id}/cancel")
        seen = events_in((await creating).text)
        again = await followed(server, response_id)
    assert kinds(seen)[:3] == ["created", "queued", "in_progress"]
    assert events_in(again.text)[: len(seen)] == seen


async def test_a_response_that_was_lost_has_failed() -> None:
    store = ResponseStore()
    async with served_endlessly() as server:
        creating = asyncio.create_task(respond(server, background=True, stream=True))
        response_id = await begun(server)
        body = server.service.storage.responses.get("", response_id)
        assert body is not None
        await server.client.post(f"{PATH}/{response_id}/cancel")
        await creating
    store.put("", response_id, StoredResponse(body.body, body.input, is_finished=False))
    async with served() as server:
        object.__setattr__(server.service, "storage", Storage(store))
        lost = await followed(server, response_id, starting_after=7)
    assert '"sequence_number": 8' in lost.text
    assert '"code": "server_error"' in lost.text


async def test_other_responses_are_not_streamed_again() -> None:
    async with served(b"Hello!") as server:
        whole = (await respond(server)).json()
        refused = await followed(server, whole["id"])
        unknown = await followed(server, "resp_0")
        query = await server.client.get(f"{PATH}/{whole['id']}", params={"starting_after": 3})
        bad = await followed(server, whole["id"], starting_after=-1)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")
    assert unknown.status_code == 404
    assert (query.status_code, query.json()["error"]["param"]) == (400, "starting_after")
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "starting_after")
