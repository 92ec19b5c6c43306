"""Models that cannot be loaded, that are unloaded under their requests, and a server that dies while it loads one."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.server_process import Address, Server, wait_until
from scripts.soak.client import CHAT, ask, ask_all
from tests.support.live import ask_golden, golden_cases, golden_request, live_server, strange
from tests.support.small_model import small_model

pytestmark = pytest.mark.timeout(240)

NUM_REQUESTS = 60


def fetched(address: Address, path: str) -> Any:
    return httpx.get(f"http://{address.host}:{address.port}{path}", trust_env=False).json()


def state_of(address: Address, model_id: str) -> str:
    cards = fetched(address, "/v1/models")["data"]
    return next(str(card["status"]["value"]) for card in cards if card["id"] == model_id)


async def unload(address: Address, model_id: str) -> None:
    body = {"model": model_id}
    assert (await ask(address, "/models/unload", body)).status == 200


def test_models_that_cannot_be_loaded_fail_alone_and_the_server_says_which(tmp_path: Path) -> None:
    """A file that is no model, one that is cut off, and weights that are not those of their config."""
    garbage, cut = tmp_path / "garbage.gguf", tmp_path / "cut.gguf"
    garbage.write_bytes(os.urandom(4096))
    cut.write_bytes(b"GGUF\x03\0\0\0\1\0\0\0")
    other = tmp_path / "other"
    other.mkdir()
    for file in small_model().iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    names = {"garbage": garbage, "cut": cut, "other": other}
    listed = ",".join(f"{name}={path}" for name, path in names.items())
    with live_server(models=listed) as server:
        address = server.address()
        for name in names:
            (case,) = golden_cases(1)
            body = golden_request(case, model=name, stream=False)
            outcome = asyncio.run(ask(address, CHAT, body))
            assert outcome.status == 500
        assert fetched(address, "/health") == {"status": "ok", "failed_models": list(names)}
        assert asyncio.run(ask_golden(address)) == []
        assert server.stop() == 0


async def ask_beside_unloads(address: Address, model_ids: list[str]) -> list[str]:
    """Ask all models while each of them is unloaded again and again; return what was strange."""
    asked = golden_cases(NUM_REQUESTS)
    bodies = [golden_request(c, model=model_ids[i % 2]) for i, c in enumerate(asked)]
    asking = asyncio.create_task(ask_all(address, CHAT, bodies))
    while not asking.done():
        for model_id in model_ids:
            await unload(address, model_id)
    # The last answers may have loaded one of them behind its unloading.
    for model_id in model_ids:
        await unload(address, model_id)
    return strange(asked, await asking)


def test_requests_are_answered_whenever_their_models_are_unloaded() -> None:
    model = str(small_model())
    with live_server(models=f"second={model}", model_id="first", weights_cache_gib="0") as server:
        address = server.address()
        assert asyncio.run(ask_beside_unloads(address, ["first", "second"])) == []
        for model_id in ("first", "second"):
            wait_until(lambda name=model_id: state_of(address, name) == "unloaded", model_id)  # type: ignore[misc]
        assert fetched(address, "/health") == {"status": "ok"}
        assert server.stop() == 0
        assert "Traceback" not in server.log


def test_a_server_that_was_killed_while_a_model_loaded_starts_and_loads_it(tmp_path: Path) -> None:
    progress = tmp_path / "slow"
    progress.write_text("0.4")

    def start() -> Server:
        return Server(("-m", "tests.support.scripted_server"), models=f"slow={progress}")

    body = {"model": "slow", "messages": [{"role": "user", "content": "[[say hello]]"}]}
    with start() as server:
        address = server.address()
        httpx.post(f"{server.url}/models/load", json={"model": "slow"}, trust_env=False)
        wait_until(lambda: state_of(address, "slow") == "loading", "it does not load")
        server.send_signal(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
    progress.write_text("1")
    with start() as server:
        address = server.address()
        assert state_of(address, "slow") == "unloaded"
        assert asyncio.run(ask(address, CHAT, body)).status == 200
        assert state_of(address, "slow") == "loaded"
        assert server.stop() == 0


def test_a_shutdown_does_not_wait_for_a_load(tmp_path: Path) -> None:
    progress = tmp_path / "slow"
    progress.write_text("0.4")
    with Server(("-m", "tests.support.scripted_server"), models=f"slow={progress}") as server:
        address = server.address()
        httpx.post(f"{server.url}/models/load", json={"model": "slow"}, trust_env=False)
        wait_until(lambda: state_of(address, "slow") == "loading", "it does not load")
        assert server.stop() == 0
        assert "Traceback" not in server.log
