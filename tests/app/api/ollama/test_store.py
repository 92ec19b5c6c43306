"""`/api/pull` and `/api/delete`, against a hub that stands in."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from pydantic import SecretStr

from app.api.ollama import store
from app.store.download import bytes_to_fetch
from app.store.hub import Repository
from tests.support.hub import Hub
from tests.support.hub_cache import hub_of, use_cache
from tests.support.local_models import model_files, safetensors
from tests.support.speaker import MODEL_ID, Served, served

pytestmark = pytest.mark.anyio

NAME: Final = "org/model"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_cache(monkeypatch, tmp_path)


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_of(monkeypatch) as hub:
        hub.repositories[NAME] = {**model_files(), "model.safetensors": safetensors(5000)}
        yield hub


async def delete(server: Served, **body: Any) -> httpx.Response:
    return await server.client.request("DELETE", "/api/delete", json=body)


async def test_a_model_is_pulled_and_deleted(hub: Hub, cache: Path) -> None:
    async with served() as server:
        response = await server.post("/api/pull", {"model": NAME})
        first, *_, downloaded, checking, last = map(json.loads, response.text.splitlines())
        assert first == {"status": "pulling manifest"}
        assert downloaded["total"] == downloaded["completed"] > 5000
        assert (checking["status"], last["status"]) == ("verifying sha256 digest", "success")
        assert (cache / "models--org--model").is_dir()
        again = await server.post("/api/pull", {"name": NAME, "stream": False})
        assert again.json() == {"status": "success"}
        assert (await delete(server, name=NAME)).status_code == 200
        assert not (cache / "models--org--model").exists()
        assert (await delete(server, model=NAME)).status_code == 404


async def test_files_are_looked_at_beside_the_event_loop(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def counted(repository: Repository) -> int:
        threads.append(threading.current_thread())
        return bytes_to_fetch(repository)

    monkeypatch.setattr(store, "bytes_to_fetch", counted)
    async with served() as server:
        await server.post("/api/pull", {"model": NAME})
    assert len(threads) >= 2
    assert threading.current_thread() not in threads


async def test_what_the_hub_does_not_give_is_told(hub: Hub) -> None:
    async with served() as server:
        streamed = await server.post("/api/pull", {"model": "org/none"})
        whole = await server.post("/api/pull", {"model": "org/none", "stream": False})
    assert "org/none" in json.loads(streamed.text.splitlines()[-1])["error"]
    assert whole.status_code == 400


async def test_a_model_that_is_loaded_is_not_deleted(cache: Path) -> None:
    async with served() as server:
        await server.chat()
        response = await delete(server, model=MODEL_ID)
    assert response.status_code == 400
    assert "unload it first" in response.json()["error"]


async def test_a_model_that_is_not_loaded_is_deleted_by_where_it_is(cache: Path) -> None:
    async with served(model_ids=(MODEL_ID, "other")) as server:
        response = await delete(server, model="other")
    assert response.status_code == 404
    assert "speaker" in response.json()["error"]


async def test_only_an_admin_may(cache: Path) -> None:
    async with served(api_keys=SecretStr("user"), admin_keys=SecretStr("boss")) as server:
        server.client.headers["Authorization"] = "Bearer user"
        assert (await server.post("/api/pull", {"model": NAME})).status_code == 403
        assert (await delete(server, model=NAME)).status_code == 403
