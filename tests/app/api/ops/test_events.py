"""`GET /server/events`: who may watch, and what the response is like."""

import asyncio
import json
from typing import Any, Final

import pytest
from pydantic import SecretStr

from app.api.ops import events
from app.observability import machine_room
from tests.support.speaker import MODEL_ID, Served, served

pytestmark = pytest.mark.anyio

PATH: Final = "/server/events"


async def watched(server: Served, path: str = PATH, **headers: str) -> Any:
    """Watch until the engine stops; return the frames."""
    room = server.service.machine_room
    request = asyncio.create_task(server.client.get(path, headers=headers))
    ours = room.watch(server.engine)
    async for _ in ours.frames():
        if room.num_watchers == 2:
            break
    for _ in range(3):
        await anext(ours.frames())
    server.manager.close()
    response = await request
    ours.close()
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert room.num_watchers == 0
    return [json.loads(line[6:]) for line in response.text.splitlines() if line[:6] == "data: "]


@pytest.fixture
def _no_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_room, "INTERVAL", 0.0)


@pytest.mark.usefixtures("_no_interval")
async def test_without_keys_every_client_may_watch() -> None:
    async with served() as server:
        frames = await watched(server)
    assert frames
    assert {frame["stats"]["num_blocks"] for frame in frames} == {64}


@pytest.mark.usefixtures("_no_interval")
async def test_with_keys_an_admins_is_needed() -> None:
    async with served(api_keys=SecretStr("one"), admin_keys=SecretStr("root")) as server:
        for key, status in (("none", 401), ("one", 403)):
            response = await server.client.get(PATH, headers={"x-api-key": key})
            assert response.status_code == status
        assert "MLX_SERVER_ADMIN_KEYS" in response.json()["error"]["message"]
        # It is a key as others are, too.
        response = await server.client.get("/v1/models", headers={"x-api-key": "root"})
        assert response.status_code == 200
        assert await watched(server, authorization="Bearer root")


async def test_where_all_keys_are_of_clients_it_is_closed() -> None:
    async with served(api_keys=SecretStr("one")) as server:
        response = await server.client.get(PATH, headers={"x-api-key": "one"})
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "forbidden"


async def test_too_many_watchers_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_WATCHERS", 1)
    async with served() as server:
        watcher = server.service.machine_room.watch(server.engine)
        response = await server.client.get(PATH)
        watcher.close()
    assert response.status_code == 503


async def test_a_model_is_named_and_an_unknown_one_is_not_found() -> None:
    async with served() as server:
        assert (await server.client.get(f"{PATH}?model=other")).status_code == 404
        assert await watched(server, f"{PATH}?model={MODEL_ID}")


async def test_it_is_not_in_the_schema() -> None:
    async with served() as server:
        paths = (await server.client.get("/openapi.json")).json()["paths"]
    assert PATH not in paths
    assert not [path for path in paths if path == "/" or path.startswith("/web")]
