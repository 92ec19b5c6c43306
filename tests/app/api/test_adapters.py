"""Requests that name an adapter, in every API; what the server lists and measures of them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from pydantic import SecretStr

from app.observability.metrics.adapters import MAX_NAMES
from app.observability.metrics.registry import Metrics
from app.observability.request_record import RequestRecord
from batching import (
    AdapterFile,
    Embeddings,
    FinishReason,
    ModelNotFound,
    PoolingType,
    Priority,
    SequenceStats,
)
from batching.adapters.adapter import NO_ADAPTERS
from tests.support.batches import chat_line, records as records_of, run
from tests.support.metrics_page import MetricsPage
from tests.support.served_adapters import LAYERS, SayingAdapters, open_adapter, write_adapter
from tests.support.speaker import MODEL_ID, Served, served

pytestmark = pytest.mark.anyio

HI: Final = [{"role": "user", "content": "Hi"}]
TEXTS: Final[dict[str, tuple[dict[str, Any], Callable[[Any], str]]]] = {
    "/v1/chat/completions": ({"messages": HI}, lambda a: a["choices"][0]["message"]["content"]),
    "/v1/completions": ({"prompt": "Hi"}, lambda a: a["choices"][0]["text"]),
    "/v1/responses": ({"input": "Hi"}, lambda a: a["output"][0]["content"][0]["text"]),
    "/v1/messages": ({"max_tokens": 9, "messages": HI}, lambda a: a["content"][0]["text"]),
    "/api/chat": ({"messages": HI, "stream": False}, lambda a: a["message"]["content"]),
    "/api/generate": ({"prompt": "Hi", "stream": False}, lambda a: a["response"]),
}


@asynccontextmanager
async def adapting(folder: Path, *names: str, **options: Any) -> AsyncIterator[Served]:
    """Serve a model that says the names of its adapters."""
    async with served(runner=SayingAdapters, **{"adapters": LAYERS, **options}) as server:
        for seed, name in enumerate(names):
            file = open_adapter(folder, name, seed)
            server.manager.adapters.add(name, MODEL_ID, file, source=f"/folders/{name}")
        yield server


@pytest.mark.parametrize("path", TEXTS)
async def test_every_api_serves_an_adapter_as_a_model(tmp_path: Path, path: str) -> None:
    fields, text_of = TEXTS[path]
    async with adapting(tmp_path, "cats", "dogs") as server:
        for model in ("cats", f"{MODEL_ID}:dogs", MODEL_ID):
            name = model.removeprefix(f"{MODEL_ID}:")
            response = await server.post(path, {"model": model, **fields})
            assert response.status_code == 200, response.text
            answer = response.json()
            assert text_of(answer) == ("Hello!" if name == MODEL_ID else name)
            # Ollama's clients get the name that they have sent.
            assert answer["model"] == (model if path.startswith("/api/") else name)
        stats = await server.engine.stats()
    assert (stats.num_adapter_loads, stats.num_adapters_loaded) == (2, 2)


async def test_streams_responses_in_the_background_and_ollamas_tag(tmp_path: Path) -> None:
    async with adapting(tmp_path, "cats") as server:
        streamed = await server.chat(model="cats", stream=True)
        assert '"c"' in streamed.text and '"model":"cats"' in streamed.text
        body = {"model": "cats", "input": "Hi", "background": True}
        begun = (await server.post("/v1/responses", body)).json()
        await server.service.detached[begun["id"]].task
        answer = (await server.client.get(f"/v1/responses/{begun['id']}")).json()
        assert answer["output"][0]["content"][0]["text"] == answer["model"] == "cats"
        body = {"model": "cats:latest", "prompt": "Hi", "stream": False}
        assert (await server.post("/api/generate", body)).json()["response"] == "cats"


async def test_vectors_and_tokens_are_an_adapters_too(tmp_path: Path) -> None:
    embeddings = Embeddings(pooling=PoolingType.MEAN, size=4)
    async with adapting(tmp_path, "cats", embeddings=embeddings) as server:
        answer = await server.post("/v1/embeddings", {"model": "cats", "input": "Hi"})
        assert answer.json()["model"] == "cats"
        assert (await server.engine.stats()).num_adapter_loads == 1
        counted = await server.post("/tokenize", {"model": "cats", "prompt": "Hi"})
        assert counted.json()["count"] == 2


async def test_lines_of_a_batch_name_adapters(tmp_path: Path) -> None:
    async with adapting(tmp_path, "cats") as server:
        lines = [chat_line("a", model="cats"), chat_line("b", model=f"{MODEL_ID}:cats")]
        lines += [chat_line("c"), chat_line("d", model="mice")]
        batch = await run(server, lines)
        results = await records_of(server, batch["output_file_id"])
        texts = {
            each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"]
            for each in results
        }
        assert texts == {"a": "cats", "b": "cats", "c": "Hello!"}
        (failed,) = await records_of(server, batch["error_file_id"])
        assert failed["response"]["status_code"] == 404


async def test_an_unknown_name_is_told_with_near_ones(tmp_path: Path) -> None:
    async with adapting(tmp_path, "cats", model_ids=(MODEL_ID, "other")) as server:
        for model in ("cat", "other:cats", "none:cats", ":mice"):
            answer = await server.chat(model=model)
            assert answer.status_code == 404
        assert "did you mean 'cats'?" in (await server.chat(model="cat")).json()["error"]["message"]
        with pytest.raises(ModelNotFound):
            server.manager.resolve("mice")
        assert server.manager.loaded("mice") is None


async def test_the_name_of_a_model_is_before_that_of_an_adapter(tmp_path: Path) -> None:
    async with adapting(tmp_path, "cats", model_ids=(MODEL_ID, f"{MODEL_ID}:cats")) as server:
        answer = await server.chat(model=f"{MODEL_ID}:cats")
        assert answer.json()["choices"][0]["message"]["content"] == "Hello!"


async def test_an_adapter_that_does_not_fit_is_the_fault_of_the_field_model(tmp_path: Path) -> None:
    async with adapting(tmp_path) as server:
        file = AdapterFile(write_adapter(tmp_path / "wide", inputs=9), "wide")
        server.manager.adapters.add("wide", MODEL_ID, file, source="wide")
        for _ in range(2):
            answer = await server.chat(model="wide")
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "model"
            assert "q_proj has 9 inputs, the model's has 8" in answer.json()["error"]["message"]


async def test_a_model_without_adapters_says_so(tmp_path: Path) -> None:
    async with adapting(tmp_path, "cats", adapters=NO_ADAPTERS) as server:
        answer = await server.chat(model="cats")
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": f"the model '{MODEL_ID}' is served without adapters",
        "type": "invalid_request_error",
        "param": "model",
        "code": None,
    }


async def test_adapters_are_listed_after_their_base(tmp_path: Path) -> None:
    keys = {"api_keys": SecretStr("user"), "admin_keys": SecretStr("boss")}
    names = (MODEL_ID, "other")
    async with adapting(tmp_path, "cats", model_ids=names, **keys) as server:
        server.client.headers["Authorization"] = "Bearer user"
        await server.chat()
        listed = (await server.client.get("/v1/models")).json()
        base, card, other = listed["data"]
        assert [base["id"], card["id"], other["id"]] == [MODEL_ID, "cats", "other"]
        assert (listed["first_id"], listed["last_id"]) == (MODEL_ID, "other")
        assert (base["parent"], card["parent"], other["parent"]) == (None, MODEL_ID, None)
        assert (card["root"], card["aliases"], card["memory"]) == (
            "cats",
            [f"{MODEL_ID}:cats"],
            None,
        )
        for field in ("max_model_len", "capabilities", "status", "batching"):
            assert card[field] == base[field] is not None
        for name in ("cats", f"{MODEL_ID}:cats"):
            assert (await server.client.get(f"/v1/models/{name}")).json() == card
        assert (await server.client.get("/v1/models/mice")).status_code == 404
        server.client.headers["Authorization"] = "Bearer boss"
        assert (await server.client.get("/v1/models/cats")).json()["root"] == "/folders/cats"
        headers = {"anthropic-version": "2023-06-01"}
        model = (await server.client.get("/v1/models/cats", headers=headers)).json()
        assert (model["type"], model["id"], model["max_tokens"]) == ("model", "cats", 2048)


async def test_ollama_lists_and_shows_adapters_with_their_parent(tmp_path: Path) -> None:
    async with adapting(tmp_path, "cats") as server:
        base, cats = (await server.client.get("/api/tags")).json()["models"]
        assert (base["name"], base["details"]["parent_model"]) == (MODEL_ID, "")
        assert (cats["name"], cats["details"]["parent_model"]) == ("cats", MODEL_ID)
        adapter = server.manager.adapters.find("cats")
        assert adapter is not None and cats["digest"] == adapter.adapter.digest
        shown = (await server.post("/api/show", {"model": "cats:latest"})).json()
        assert shown["details"]["parent_model"] == MODEL_ID


async def test_an_adapter_goes_on_when_it_is_not_served_any_more(tmp_path: Path) -> None:
    async with adapting(tmp_path, "cats", is_gated=True) as server:
        manager = server.manager
        lease = manager.request("cats").future.result()
        adapter = manager.adapter("cats")
        assert adapter is not None
        view = lease.engine.adapted(adapter.file)
        assert manager.adapters.remove("cats") is adapter
        assert (await server.chat(model="cats")).status_code == 404
        assert adapter.file.is_open and view.adapter is adapter.file
        assert view.model.model_id == "cats" and lease.engine.model.model_id == MODEL_ID


async def page(server: Served) -> MetricsPage:
    assert (await server.client.get("/metrics")).status_code == 200
    return MetricsPage(server.service.metrics, MODEL_ID)


async def in_requests(server: Served) -> dict[str, str]:
    name = "vllm:lora_requests_info"
    (labels,) = (s.labels for s in (await page(server)).samples if s.name == name)
    return labels


async def test_metrics_have_the_adapters_by_name(tmp_path: Path) -> None:
    records: list[RequestRecord] = []
    async with adapting(tmp_path, "cats", "dogs", "mice", is_gated=True) as server:
        object.__setattr__(server.service, "on_finish", records.append)
        # Once the state of the model is known, loaded or not.
        assert (await page(server))("mlx_server:adapters_loaded") == 0
        asking = asyncio.create_task(server.chat(model="cats"))
        await asyncio.to_thread(server.gate.reached.wait, 20)
        late = [asyncio.create_task(server.chat(model=m)) for m in (MODEL_ID, "dogs")]
        while (in_use := await in_requests(server))["waiting_lora_adapters"] != "dogs":
            # A thread describes the models, so that the other request goes on meanwhile.
            await server.client.get("/v1/models")
        assert in_use == {
            "model_name": MODEL_ID,
            "max_lora": "2",
            "running_lora_adapters": "cats",
            "waiting_lora_adapters": "dogs",
        }
        server.gate.open()
        await asyncio.gather(asking, *late)
        for model in ("mice", "cats"):
            await server.chat(model=model)
        found = await page(server)
    assert found("mlx_server:adapters_loaded") == 2
    assert found("mlx_server:adapter_loads_total") == 4
    assert found("mlx_server:adapter_hits_total") == 0
    assert found("mlx_server:adapter_requests_total", adapter="cats") == 2
    # With the token that ends it.
    assert found("mlx_server:adapter_generation_tokens_total", adapter="cats") == 2 * 5
    prompt = len("user: Hi\nassistant:")
    assert found("mlx_server:adapter_prompt_tokens_total", adapter="dogs") == prompt
    assert found("mlx_server:adapter_first_token_seconds_total", adapter="dogs")
    assert sorted(record.model_id for record in records) == sorted(
        ["cats", "dogs", "mice", "cats", MODEL_ID]
    )


def sequence(adapter: str) -> SequenceStats:
    return SequenceStats(
        num_prompt_tokens=1,
        max_tokens=1,
        num_choices=1,
        priority=Priority.NORMAL,
        arrival_time=0.0,
        end_time=1.0,
        finish_reason=FinishReason.STOP,
        adapter=adapter,
    )


def test_metrics_have_a_bounded_number_of_names() -> None:
    metrics = Metrics([MODEL_ID])
    for name in [*map(str, range(MAX_NAMES + 2)), "0"]:
        metrics.engines[MODEL_ID].observe_end(sequence(name))
    found = MetricsPage(metrics, MODEL_ID)
    counts = {
        s.labels["adapter"]: s.value
        for s in found.samples
        if s.name == "mlx_server:adapter_requests_total"
    }
    assert len(counts) == MAX_NAMES + 1
    assert (counts["0"], counts["other"]) == (2, 2)


async def test_the_log_names_the_adapter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "app.observability.request_log")
    async with adapting(tmp_path, "cats") as server:
        await server.chat(model="cats")
        await server.chat()
    with_adapter, without = [r.getMessage() for r in caplog.records if "prompt=" in r.getMessage()]
    assert "adapter=cats" in with_adapter and "adapter" not in without
