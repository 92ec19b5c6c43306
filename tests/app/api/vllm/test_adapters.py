"""Adapters that are loaded and unloaded while the server runs."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from app.api.vllm import adapters
from batching import AdapterFile, ModelState
from tests.support.served_adapters import LAYERS, SayingAdapters, write_adapter
from tests.support.speaker import MODEL_ID, Served, served

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def open_to_adapters(folder: Path, **options: Any) -> AsyncIterator[Served]:
    """Serve a model, and let the adapters of a folder be loaded."""
    fields = {"allow_runtime_adapters": True, "adapter_dirs": f"/nowhere,{folder}", **options}
    async with served(runner=SayingAdapters, adapters=LAYERS, **fields) as server:
        yield server


async def load(server: Served, name: Any, path: Any, **fields: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), **fields}
    return await server.post("/v1/load_lora_adapter", body)


async def unload(server: Served, name: str) -> httpx.Response:
    return await server.post("/v1/unload_lora_adapter", {"lora_name": name})


async def said(server: Served, model: str) -> str:
    answer = await server.chat(model=model)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def error_of(answer: httpx.Response) -> tuple[int, str | None, str]:
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


async def test_an_adapter_is_loaded_used_and_unloaded(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a")
    async with open_to_adapters(tmp_path) as server:
        assert (await server.chat(model="cats")).status_code == 404
        answer = await load(server, "cats", tmp_path / "a")
        assert (answer.status_code, answer.text) == (
            200,
            "Success: LoRA adapter 'cats' added successfully.",
        )
        # It was loaded to see whether the adapter fits.
        await server.until(ModelState.LOADED)
        assert await said(server, "cats") == "cats"
        card = (await server.client.get("/v1/models/cats")).json()
        assert (card["parent"], card["root"]) == (MODEL_ID, str(tmp_path / "a"))
        answer = await unload(server, "cats")
        assert (answer.status_code, answer.text) == (
            200,
            "Success: LoRA adapter 'cats' removed successfully.",
        )
        assert (await server.chat(model="cats")).status_code == 404
        assert error_of(await unload(server, "cats"))[0] == 404


async def test_an_adapter_is_added_to_the_base_that_is_named(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a")
    async with open_to_adapters(tmp_path, model_ids=(MODEL_ID, "other")) as server:
        answer = await load(server, "cats", tmp_path / "a", base_model_name="other")
        assert answer.status_code == 200
        assert (await server.client.get("/v1/models/cats")).json()["parent"] == "other"
        answer = await load(server, "dogs", tmp_path / "a", base_model_name="none")
        assert error_of(answer)[0] == 404


async def test_a_name_is_there_once_unless_its_adapter_is_replaced(tmp_path: Path) -> None:
    for seed, folder in enumerate("ab"):
        write_adapter(tmp_path / folder, seed)
    async with open_to_adapters(tmp_path) as server:
        await load(server, "cats", tmp_path / "a")
        first = server.manager.adapters.find("cats")
        status, param, message = error_of(await load(server, "cats", tmp_path / "b"))
        assert (status, param) == (400, "lora_name")
        assert "already loaded" in message
        answer = await load(server, "cats", tmp_path / "b", load_inplace=True)
        assert answer.status_code == 200
        second = server.manager.adapters.find("cats")
        assert first is not None and second is not None
        assert first.adapter.digest != second.adapter.digest
        assert await said(server, "cats") == "cats"


@pytest.mark.parametrize(
    ("name", "path", "param", "message"),
    [
        (MODEL_ID, "a", "lora_name", "is the name of a model"),
        ("a:b", "a", "lora_name", "cannot be the name of an adapter"),
        ("", "a", "lora_name", "cannot be the name of an adapter"),
        ("cats", "none", "lora_path", "there is no folder"),
        ("cats", "..", "lora_path", "is not within the folders"),
        ("cats", "../../etc", "lora_path", "is not within the folders"),
        ("cats", "out", "lora_path", "is not within the folders"),
        ("cats", "empty", "lora_path", "empty"),
        ("cats", "wide", "lora_path", "q_proj has 9 inputs, the model's has 8"),
        ("cats", "strong", "lora_path", "has rank 5; the limit is 4"),
    ],
)
async def test_what_cannot_be_served_is_told_by_field(
    tmp_path: Path, name: str, path: str, param: str, message: str
) -> None:
    allowed = tmp_path / "allowed"
    write_adapter(allowed / "a")
    write_adapter(allowed / "wide", inputs=9)
    write_adapter(allowed / "strong", rank=5)
    (allowed / "empty").mkdir()
    (allowed / "out").symlink_to(write_adapter(tmp_path / "outside"))
    async with open_to_adapters(allowed) as server:
        status, found, text = error_of(await load(server, name, allowed / path))
        assert (status, found) == (400, param)
        assert message in text and "\n" not in text
        assert server.manager.adapters.of(MODEL_ID) == []


async def test_a_name_is_checked_before_a_model_is_loaded_for_it(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a")
    async with open_to_adapters(tmp_path) as server:
        assert error_of(await load(server, "a:b", tmp_path / "a"))[:2] == (400, "lora_name")
        assert server.manager.loaded(MODEL_ID) is None


async def test_prompts_are_rendered_beside_slow_disks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read = threading.Event()

    def read(folder: Path, name: str) -> AdapterFile:
        assert may_read.wait(30)
        return AdapterFile(folder, name)

    monkeypatch.setattr(adapters, "AdapterFile", read)
    names = "abcd"
    for each in names:
        write_adapter(tmp_path / each)
    async with open_to_adapters(tmp_path) as server:
        loads = [asyncio.create_task(load(server, each, tmp_path / each)) for each in names]
        try:
            assert (await server.chat()).status_code == 200
            assert not any(each.done() for each in loads)
        finally:
            may_read.set()
        assert {each.status_code for each in await asyncio.gather(*loads)} == {200}


async def test_a_hub_id_is_no_folder_that_is_allowed(tmp_path: Path) -> None:
    async with open_to_adapters(tmp_path) as server:
        assert error_of(await load(server, "cats", "org/adapter"))[:2] == (400, "lora_path")


async def test_only_admins_may_and_only_if_the_operator_lets_them(tmp_path: Path) -> None:
    keys = {"api_keys": SecretStr("user"), "admin_keys": SecretStr("boss")}
    async with open_to_adapters(tmp_path, **keys) as server:
        server.client.headers["Authorization"] = "Bearer user"
        for answer in (await load(server, "cats", "a"), await unload(server, "cats")):
            assert error_of(answer) == (403, None, "this needs a key of MLX_SERVER_ADMIN_KEYS")
        server.client.headers["Authorization"] = "Bearer boss"
        assert error_of(await unload(server, "cats"))[0] == 404
    async with open_to_adapters(tmp_path, allow_runtime_adapters=False) as server:
        for answer in (await load(server, "cats", "a"), await unload(server, "cats")):
            status, _, message = error_of(answer)
            assert status == 403 and "MLX_SERVER_ALLOW_RUNTIME_ADAPTERS=true" in message


async def test_of_two_loads_of_a_name_at_once_one_is_served(tmp_path: Path) -> None:
    for seed, folder in enumerate("ab"):
        write_adapter(tmp_path / folder, seed)
    may_load = threading.Event()
    async with open_to_adapters(tmp_path, may_load=may_load) as server:
        loads = [asyncio.create_task(load(server, "cats", tmp_path / each)) for each in "ab"]
        await server.until(ModelState.LOADING)
        may_load.set()
        answers = await asyncio.gather(*loads)
        assert sorted(answer.status_code for answer in answers) == [200, 400]
        assert len(server.manager.adapters.of(MODEL_ID)) == 1


async def test_loads_and_unloads_beside_requests_change_no_answer(tmp_path: Path) -> None:
    names = [f"cats{i}" for i in range(4)]
    for seed, name in enumerate(names):
        write_adapter(tmp_path / name, seed)
    random = Random(7)
    async with open_to_adapters(tmp_path) as server:

        async def ask(name: str) -> None:
            answer = await server.chat(model=name)
            assert answer.status_code in (200, 404), answer.text
            if answer.status_code == 200:
                assert answer.json()["choices"][0]["message"]["content"] == name

        async def change(name: str) -> None:
            fields = {"load_inplace": True}
            is_load = random.random() < 0.6
            answer = (
                await load(server, name, tmp_path / name, **fields)
                if is_load
                else await unload(server, name)
            )
            assert answer.status_code in ((200,) if is_load else (200, 404))

        for _ in range(10):
            acts = [(ask, change)[random.random() < 0.4](random.choice(names)) for _ in range(100)]
            await asyncio.gather(*acts)
        stats = await server.engine.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        for name in names:
            await unload(server, name)
        gc.collect()
        assert [path for path in open_paths() if path.startswith(str(tmp_path))] == []


def open_paths() -> list[str]:
    files = (each for each in gc.get_objects() if isinstance(each, AdapterFile))
    return [file.adapter.path for file in files if file.is_open]
