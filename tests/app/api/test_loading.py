"""Requests for models that are not loaded: they wait, their streams are kept alive, operators load and unload."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Final

import httpx
import pytest
from mlx_lm.tool_parsers import json_tools
from pydantic import SecretStr

from app.api import serving
from app.api.models.cards import capabilities
from app.api.models.management import MAX_LISTENERS, ModelChanges
from app.http.streams.early_stream import EarlyStream, StreamForm
from batching import (
    Embeddings,
    EngineConfig,
    MemoryNeed,
    ModelInfo,
    ModelLoadError,
    ModelState,
    PoolingType,
    Reranker,
    SchedulerManager,
    ServedModel,
)
from tests.support.marker_tokenizer import MarkerTokenizer
from tests.support.speaker import MODEL_ID, Served, served
from tests.support.tool_formats import END_ID, VOCAB_SIZE, VOCABULARY, TemplateTokenizer

pytestmark = pytest.mark.anyio

PATHS: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]},
}


@pytest.fixture
def comments(monkeypatch: pytest.MonkeyPatch) -> asyncio.Semaphore:
    """Count the comments that streams get while a model loads."""
    monkeypatch.setattr(serving, "PING_INTERVAL", 0.001)
    sent, send = asyncio.Semaphore(0), EarlyStream.comment

    async def comment(stream: EarlyStream, text: str, form: StreamForm) -> None:
        await send(stream, text, form)
        sent.release()

    monkeypatch.setattr(EarlyStream, "comment", comment)
    return sent


async def ask(server: Served, path: str, **fields: Any) -> httpx.Response:
    return await server.post(path, {"model": MODEL_ID, **PATHS[path], **fields})


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_is_kept_alive_while_its_model_loads(
    path: str, comments: asyncio.Semaphore
) -> None:
    may_load = threading.Event()
    async with served(may_load=may_load) as server:
        asking = asyncio.create_task(ask(server, path, stream=True))
        for _ in range(3):
            await comments.acquire()
        may_load.set()
        response = await asking
    assert response.status_code == 200
    assert response.headers["Content-Type"].startswith("text/event-stream")
    assert response.text.startswith(": the model is being loaded\n\n" * 3)
    assert all(f'"{character}"' in response.text for character in "Helo!")


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_that_has_begun_says_why_there_is_no_answer(
    path: str, comments: asyncio.Semaphore
) -> None:
    def build(*_: Any) -> Any:
        assert may_load.wait(20)
        raise ModelLoadError("/secret/model: no such file")

    may_load = threading.Event()
    async with served() as server:
        manager = SchedulerManager([EngineConfig(model="m", model_id=MODEL_ID)], build)
        object.__setattr__(server.service, "manager", manager)
        asking = asyncio.create_task(ask(server, path, stream=True))
        await comments.acquire()
        may_load.set()
        response = await asking
        assert response.status_code == 200
        assert "event: error\ndata: {" in response.text
        assert "the model cannot be loaded" in response.text
        assert "secret" not in response.text
        # Of a load that has failed already the status is still to be had.
        assert (await ask(server, path, stream=True)).status_code == 500
        health = (await server.client.get("/health")).json()
        assert health == {"status": "ok", "failed_models": [MODEL_ID]}
        (card,) = (await server.client.get("/v1/models")).json()["data"]
        manager.close()
    assert card["status"]["failed"] and card["status"]["value"] == "unloaded"
    assert card["status"]["reason"] == "/secret/model: no such file"


async def test_a_request_waits_for_its_model_and_not_longer_than_its_time() -> None:
    may_load = threading.Event()
    async with served(may_load=may_load) as server:
        late = await server.chat(timeout=0.01)
        assert late.status_code == 503
        assert late.json()["error"]["code"] == "model_not_ready"
        assert int(late.headers["Retry-After"]) > 0
        await server.until(ModelState.UNLOADED)
        asking = asyncio.create_task(server.chat())
        await server.until(ModelState.LOADING)
        (card,) = (await server.client.get("/v1/models")).json()["data"]
        assert card["status"]["value"] == "loading" and card["in_flight"] == 1
        may_load.set()
        assert (await asking).status_code == 200


async def test_the_operator_limits_the_wait_for_a_model() -> None:
    may_load = threading.Event()
    async with served(may_load=may_load, load_timeout=0.01) as server:
        assert (await server.chat()).status_code == 503
        assert (await server.message()).status_code == 503
        may_load.set()


async def test_a_load_ends_when_its_last_client_leaves() -> None:
    may_load = threading.Event()
    async with served(may_load=may_load) as server:
        asking = asyncio.create_task(server.chat())
        await server.until(ModelState.LOADING)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await server.until(ModelState.UNLOADED)
        assert server.service.admission.num_requests == 0
        may_load.set()
        assert (await server.chat()).status_code == 200


async def test_unknown_and_too_large_models_are_the_clients_fault() -> None:
    async with served(
        model_ids=("small", "large"),
        capacity=1 << 20,
        need=lambda config: MemoryNeed((config.model_id == "large") << 21, 1 << 21),
    ) as server:
        unknown = await server.chat(model="smal")
        assert unknown.status_code == 404
        assert "did you mean 'small'?" in unknown.json()["error"]["message"]
        large = await server.chat(model="large")
        assert large.status_code == 400
        assert large.json()["error"]["code"] == "model_too_large"
        assert "needs 2 MiB, and 1 MiB are there" in large.json()["error"]["message"]


async def test_an_operator_loads_and_unloads_models_by_name() -> None:
    client, admin = SecretStr("client"), SecretStr("admin")
    async with served(model_ids=("a", "b"), api_keys=client, admin_keys=admin) as server:
        for path in ("/models/load", "/models/unload"):
            server.client.headers["Authorization"] = "Bearer client"
            assert (await server.post(path, {"model": "b"})).status_code == 403
            server.client.headers["Authorization"] = "Bearer admin"
            assert (await server.post(path, {"model": "c"})).status_code == 404
            assert (await server.post(path, {"name": "b"})).status_code == 400
        for _ in range(2):
            loaded = await server.post("/models/load", {"model": "b"})
            assert loaded.json() == {"success": True}
        engine = server.manager.get("b")
        listed = (await server.client.get("/models")).json()["data"]
        assert [card["status"]["value"] for card in listed] == ["unloaded", "loaded"]
        assert listed[1]["capabilities"] == ["completion"]
        assert listed[1]["batching"] == {"mode": "ragged", "reason": ""}
        assert listed[1]["memory"] == {"weights": 0, "kv_cache": 0, "states": 0, "adapters": 0}
        assert (await server.client.get("/v1/models/b")).json() == listed[1]
        assert (await server.post("/models/unload", {"model": "b"})).json() == {"success": True}
        assert server.manager.engines.loaded == ()
        await server.until(ModelState.UNLOADED, "b")
        assert not engine.is_alive


async def test_a_load_that_is_refused_at_once_says_so() -> None:
    need = MemoryNeed(2, 2)
    async with served(capacity=1, need=lambda _: need) as server:
        refused = await server.post("/models/load", {"model": MODEL_ID})
    assert refused.status_code == 400


async def next_change(events: AsyncIterator[bytes]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((await anext(events)).removeprefix(b"data: "))
    return found


async def test_the_changes_of_models_are_followed_with_the_progress_of_loads() -> None:
    may_load = threading.Event()
    async with served(model_ids=("a", "b"), may_load=may_load) as server:
        changes = ModelChanges(server.manager, is_admin=True)
        events = changes.events()
        assert [await next_change(events) for _ in "ab"] == [
            {"model": "a", "value": "unloaded"},
            {"model": "b", "value": "unloaded"},
        ]
        request = server.manager.request("b")
        found = [await next_change(events)]
        while found[-1] != {"model": "b", "value": "loading", "progress": 0.5}:
            found.append(await next_change(events))
        may_load.set()
        assert await next_change(events) == {"model": "b", "value": "loaded"}
        server.manager.unload("b")
        assert await next_change(events) == {"model": "b", "value": "draining"}
        request.close()
        while (await next_change(events))["value"] != "unloaded":
            pass
        server.manager.close()
        with pytest.raises(StopAsyncIteration):
            await next_change(events)
        changes.close()
        changes.close()


async def test_only_so_many_follow_the_changes() -> None:
    async with served() as server:
        watchers = {object() for _ in range(MAX_LISTENERS)}
        server.service.model_watchers.update(watchers)
        assert (await server.client.get("/models/sse")).status_code == 503
        # One that is shown the door has not come in.
        assert server.service.model_watchers == watchers


async def test_a_model_that_is_not_loaded_is_not_watched_into_memory() -> None:
    async with served() as server:
        response = await server.client.get("/server/events")
        assert response.status_code == 503
        assert (await server.client.get("/server/events?model=x")).status_code == 404
        assert server.manager.engines.loaded == ()


async def test_an_alias_is_served_as_its_model() -> None:
    config = EngineConfig(model="m", model_id="m")
    async with served() as server:
        manager = SchedulerManager(
            [ServedModel(config=config, aliases=("gpt-4o",), is_pinned=True)],
            server.manager.engines._build,
        )
        object.__setattr__(server.service, "manager", manager)
        server.service.metrics.engines["m"] = server.service.metrics.engines[MODEL_ID]
        response = await server.chat(model="gpt-4o")
        (card,) = (await server.client.get("/v1/models")).json()["data"]
        assert (await server.client.get("/v1/models/gpt-4o")).json()["id"] == "m"
        manager.close()
    assert response.json()["model"] == "m"
    assert (card["aliases"], card["pinned"], card["expires_at"]) == (["gpt-4o"], True, None)


async def test_a_request_that_does_not_stream_gets_no_comments(comments: asyncio.Semaphore) -> None:
    may_load = threading.Event()
    async with served(may_load=may_load) as server:
        asking = asyncio.create_task(server.chat())
        await server.until(ModelState.LOADING)
        for _ in range(20):
            await asyncio.wait([asking], timeout=0.001)
        may_load.set()
        assert (await asking).json()["object"] == "chat.completion"
    assert comments.locked()


async def test_the_changes_are_a_stream_that_ends_with_the_server() -> None:
    async with served() as server:
        watching = asyncio.create_task(server.client.get("/models/sse"))
        while not server.service.model_watchers:
            await asyncio.wait([watching], timeout=0.001)
        server.manager.close()
        response = await watching
        assert response.text.startswith('data: {"model": "fake/speaker", "value": "unloaded"}')
        assert server.service.model_watchers == set()


async def test_a_card_says_what_a_model_can_do() -> None:
    tokenizer = TemplateTokenizer(
        VOCABULARY,
        "{{ tools }}<think>",
        json_tools.tool_call_start,
        json_tools.tool_call_end,
        json_tools.parse_tool_call,
    )
    plain = ModelInfo("m", tokenizer, frozenset({END_ID}), VOCAB_SIZE, 1024)
    assert capabilities(plain) == ["completion", "tools"]
    thinking = MarkerTokenizer(plain=["<think>", "</think>"], think=("<think>", "</think>"))
    of_all = replace(
        plain,
        tokenizer=thinking,
        embeddings=Embeddings(pooling=PoolingType.LAST, size=4),
        reranker=Reranker(relevant_id=1, irrelevant_id=2),
    )
    assert capabilities(of_all) == ["completion", "thinking", "embedding", "rerank"]


async def test_health_names_the_engine_that_has_stopped() -> None:
    async with served(model_ids=("a", "b")) as server:
        for name in ("a", "b"):
            server.manager.get(name)
        engine = server.manager.loaded("b")
        assert engine is not None
        await asyncio.to_thread(engine.stop)
        response = await server.client.get("/health")
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "b: the engine has stopped"
        server.manager.unload("b")
        assert (await server.client.get("/health")).status_code == 200
