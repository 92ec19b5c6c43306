"""`GET /v1/models`, `GET /v1/models/{id}` and `GET /health`."""

import threading
from datetime import datetime
from pathlib import Path

import pytest
from pydantic import BaseModel

from app import __version__
from app.api.models import schemas
from app.api.ollama import models as ollama
from batching import StoreUse
from batching.model_files import vision
from tests.support.local_models import write_folder
from tests.support.speaker import MODEL_ID, served

pytestmark = pytest.mark.anyio


async def test_the_models_are_listed() -> None:
    async with served() as server:
        response = await server.client.get("/v1/models")
    assert response.status_code == 200
    listed = response.json()
    (card,) = listed.pop("data")
    assert listed == {
        "object": "list",
        "has_more": False,
        "first_id": MODEL_ID,
        "last_id": MODEL_ID,
    }
    created = card.pop("created")
    assert created > 0
    assert datetime.fromisoformat(card.pop("created_at")).timestamp() == created
    assert card == {
        "id": MODEL_ID,
        "object": "model",
        "owned_by": "mlx-batch-server",
        "root": MODEL_ID,
        "parent": None,
        "max_model_len": None,
        "type": "model",
        "display_name": MODEL_ID,
        "lifecycle": "active",
        "aliases": [],
        "status": {"value": "unloaded", "progress": None, "failed": None, "reason": None},
        "capabilities": None,
        "architecture": None,
        "max_images": None,
        "batching": None,
        "memory": None,
        "kv_store_bytes": None,
        "in_flight": 0,
        "pinned": False,
        "expires_at": None,
    }


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/v1/models", schemas.ModelList), ("/api/tags", ollama.Tags)],
)
async def test_a_long_list_does_not_hold_up_the_event_loop(
    path: str, kind: type[BaseModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand adapters take long to be written."""
    threads: list[int] = []
    write = kind.model_dump_json

    def note(listed: BaseModel) -> str:
        threads.append(threading.get_ident())
        return write(listed)

    monkeypatch.setattr(kind, "model_dump_json", note)
    async with served() as server:
        assert (await server.client.get(path)).status_code == 200
    assert len(threads) == 1 and threading.get_ident() not in threads


async def test_the_length_of_a_loaded_model_is_listed() -> None:
    async with served() as server:
        await server.chat()
        (card,) = (await server.client.get("/v1/models")).json()["data"]
    assert card["max_model_len"] == 2048


async def test_what_is_kept_of_a_model_on_disk_is_listed() -> None:
    async with served() as server:
        await server.chat()
        engine = server.service.manager.loaded(MODEL_ID)
        assert engine is not None
        (card,) = (await server.client.get("/v1/models")).json()["data"]
        assert card["kv_store_bytes"] is None
        engine._router.latest_stats = engine.latest_stats._replace(store=StoreUse(num_bytes=7))
        (card,) = (await server.client.get("/v1/models")).json()["data"]
    assert card["kv_store_bytes"] == 7


async def test_a_model_that_is_not_loaded_takes_what_its_files_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vision, "find_spec", lambda _: object())
    # The model's files are in a folder named `speaker`.
    monkeypatch.chdir(tmp_path)
    tower = {"model_type": "qwen3_vl", "vision_config": {}, "image_token_id": 7}
    write_folder(tmp_path / "speaker", **tower)
    async with served(max_images=3) as server:
        (card,) = (await server.client.get("/v1/models")).json()["data"]
        assert card["status"]["value"] == "unloaded"
        assert card["architecture"]["input_modalities"] == ["text", "image"]
        assert card["max_images"] == 3
        assert card["capabilities"] is None
        await server.chat()
        (card,) = (await server.client.get("/v1/models")).json()["data"]
    # The loaded one knows better.
    assert card["architecture"]["input_modalities"] == ["text"]
    assert card["max_images"] is None


async def test_the_version_and_the_load_are_known() -> None:
    async with served() as server:
        version = (await server.client.get("/version")).json()
        idle = (await server.client.get("/load")).json()
        admitted = server.admitted()
        busy = (await server.client.get("/load")).json()
        admitted.ticket.release()
    assert version == {"version": __version__}
    assert (idle, busy) == ({"server_load": 0}, {"server_load": 1})


@pytest.mark.parametrize("name", [MODEL_ID, MODEL_ID.replace("/", "%2F")])
async def test_a_model_is_found_by_an_id_with_a_slash(name: str) -> None:
    async with served() as server:
        response = await server.client.get(f"/v1/models/{name}")
    assert response.status_code == 200
    assert response.json()["id"] == MODEL_ID


async def test_an_unknown_model_is_not_found() -> None:
    async with served() as server:
        response = await server.client.get("/v1/models/gpt-4")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_health_follows_the_engine() -> None:
    async with served() as server:
        alive = await server.client.get("/health")
        server.engine.stop()
        dead = await server.client.get("/health")
    assert (alive.status_code, alive.json()) == (200, {"status": "ok"})
    assert dead.status_code == 503
    assert dead.json()["error"]["type"] == "server_error"
