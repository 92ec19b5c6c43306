"""Responses that are generated without their clients, who ask for them later."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from app.server_state import DetachedResponse
from app.storage.responses.store import ResponseStore, StoredResponse
from app.storage.storage import Storage
from tests.support.responses import PATH, checked_response, respond, response
from tests.support.speaker import Breaking, Served, served, served_endlessly

pytestmark = pytest.mark.anyio


async def begin(server: Served, **fields: Any) -> dict[str, Any]:
    answer = await respond(server, background=True, **fields)
    assert answer.status_code == 200, answer.text
    return checked_response(answer.json())


async def current(server: Served, response_id: str) -> dict[str, Any]:
    answer = await server.client.get(f"{PATH}/{response_id}")
    assert answer.status_code == 200, answer.text
    return checked_response(answer.json())


async def finished(server: Served, response_id: str) -> dict[str, Any]:
    """Wait for the work on a response, and return what is stored of it."""
    await asyncio.gather(
        *(each.task for each in server.service.detached.values()), return_exceptions=True
    )
    return await current(server, response_id)


async def check_nothing_is_left(server: Served) -> None:
    assert server.service.detached == {}
    assert await server.num_unfinished() == 0
    assert server.service.admission.num_requests == 0
    assert server.service.in_flight.num_open == 0


@asynccontextmanager
async def working() -> AsyncIterator[tuple[Served, str]]:
    """Serve a response that does not end by itself, and whose first token waits."""
    async with served_endlessly() as server:
        begun = await begin(server)
        yield server, begun["id"]
        await check_nothing_is_left(server)


async def test_a_response_goes_on_without_its_client() -> None:
    async with served(b"Hello!") as server:
        begun = await begin(server)
        assert (begun["status"], begun["background"], begun["output"]) == ("queued", True, [])
        done = await finished(server, begun["id"])
        await check_nothing_is_left(server)
        continued = await response(server, "more", previous_response_id=begun["id"])
    assert done["status"] == "completed"
    assert done["output"][0]["content"][0]["text"] == "Hello!"
    assert continued["previous_response_id"] == begun["id"]


async def test_it_counts_as_a_request_until_it_ends() -> None:
    async with working() as (server, response_id):
        await asyncio.to_thread(server.gate.reached.wait)
        # The engine may be faster than the store.
        while (status := (await current(server, response_id))["status"]) == "queued":
            pass
        assert status == "in_progress"
        assert server.service.admission.num_requests == 1
        assert server.service.in_flight.num_open == 1
        early = await respond(server, previous_response_id=response_id)
        assert early.json()["error"]["param"] == "previous_response_id"
        await server.client.post(f"{PATH}/{response_id}/cancel")


async def test_a_response_is_cancelled() -> None:
    async with working() as (server, response_id):
        path = f"{PATH}/{response_id}/cancel"
        cancelled = await server.client.post(path)
        assert checked_response(cancelled.json())["status"] == "cancelled"
        assert await current(server, response_id) == cancelled.json()
        again = await server.client.post(path)
        assert again.json() == cancelled.json()


async def test_a_response_that_is_deleted_ends() -> None:
    async with working() as (server, response_id):
        deleted = await server.client.delete(f"{PATH}/{response_id}")
        assert deleted.json()["deleted"]
        assert (await server.client.get(f"{PATH}/{response_id}")).status_code == 404


async def test_only_a_response_in_the_background_is_cancelled() -> None:
    async with served() as server:
        answer = await response(server)
        refused = await server.client.post(f"{PATH}/{answer['id']}/cancel")
        begun = await begin(server)
        done = await finished(server, begun["id"])
        late = await server.client.post(f"{PATH}/{begun['id']}/cancel")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_id")
    assert late.json() == done


class NoticedTasks(dict[str, DetachedResponse]):
    """Sets an event when one of its tasks is about to be ended."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.set()
        return super().get(key, default)


async def test_a_response_that_ends_while_it_is_cancelled_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cancellation comes while the end is being written, which nothing interrupts."""
    put, tasks, is_ending = ResponseStore.put, NoticedTasks(), threading.Event()

    def put_late(store: ResponseStore, owner: str, name: str, stored: StoredResponse) -> None:
        if stored.is_finished:
            is_ending.set()
            assert tasks.asked.wait(20)
        put(store, owner, name, stored)

    monkeypatch.setattr(ResponseStore, "put", put_late)
    async with served(b"Hello!") as server:
        object.__setattr__(server.service, "detached", tasks)
        begun = await begin(server)
        await asyncio.to_thread(is_ending.wait)
        cancelled = await server.client.post(f"{PATH}/{begun['id']}/cancel")
        await check_nothing_is_left(server)
    assert cancelled.json()["status"] == "completed"


class EndingTasks(dict[str, DetachedResponse]):
    """Sets an event when one of its tasks has ended."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def pop(self, key: str, *default: Any) -> Any:
        try:
            return super().pop(key, *default)
        finally:
            self.ended.set()


@pytest.mark.parametrize(
    ("method", "path", "statuses"),
    [("GET", "", ("queued", "in_progress")), ("POST", "/cancel", ("completed",))],
)
async def test_a_response_that_ends_while_it_is_read_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, method: str, path: str, statuses: tuple[str, ...]
) -> None:
    """The row is read before the end is written, and comes back after the work has ended."""
    get, tasks = ResponseStore.get, EndingTasks()
    async with served(b"Hello!", is_gated=True) as server:

        def get_late(store: ResponseStore, owner: str, name: str) -> StoredResponse | None:
            stored = get(store, owner, name)
            server.gate.open()
            assert tasks.ended.wait(20)
            return stored

        object.__setattr__(server.service, "detached", tasks)
        begun = await begin(server)
        await asyncio.to_thread(server.gate.reached.wait)
        monkeypatch.setattr(ResponseStore, "get", get_late)
        answer = await server.client.request(method, f"{PATH}/{begun['id']}{path}")
        await check_nothing_is_left(server)
    assert checked_response(answer.json())["status"] in statuses


async def test_a_failure_is_kept() -> None:
    async with served(b"ok", runner=Breaking) as server:
        begun = await begin(server)
        done = await finished(server, begun["id"])
        await check_nothing_is_left(server)
    assert (done["status"], done["error"]["code"]) == ("failed", "server_error")


async def test_a_response_that_was_lost_with_its_server_has_failed() -> None:
    store = ResponseStore()
    async with served_endlessly() as server:
        begun = await begin(server)
        body = server.service.storage.responses.get("", begun["id"])
        assert body is not None
        await server.client.post(f"{PATH}/{begun['id']}/cancel")
    store.put("", begun["id"], body)
    async with served() as server:
        object.__setattr__(server.service, "storage", Storage(store))
        lost = await current(server, begun["id"])
        cancelled = await server.client.post(f"{PATH}/{begun['id']}/cancel")
    assert (lost["status"], lost["error"]["code"]) == ("failed", "server_error")
    assert cancelled.json() == lost


async def test_a_response_ends_with_its_engine() -> None:
    async with served_endlessly() as server:
        begun = await begin(server)
        await asyncio.to_thread(server.gate.reached.wait)
        server.gate.open()
        server.engine.stop()
        done = await finished(server, begun["id"])
    assert done["status"] == "failed"


async def test_a_request_that_is_cancelled_before_it_is_stored_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put, reached, gate = ResponseStore.put, threading.Event(), threading.Event()

    def put_late(store: ResponseStore, owner: str, name: str, stored: StoredResponse) -> None:
        reached.set()
        assert gate.wait(20)
        put(store, owner, name, stored)

    monkeypatch.setattr(ResponseStore, "put", put_late)
    async with served_endlessly() as server:
        request = asyncio.create_task(respond(server, background=True))
        await asyncio.to_thread(reached.wait)
        request.cancel()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await request
        await check_nothing_is_left(server)
