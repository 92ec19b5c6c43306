"""The prompts of a file are in the prefix cache after the start, and stay there."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from app.admission.controller import AdmissionController, AdmissionLimits
from app.batches.pacing import Pacer
from app.http.client import ANONYMOUS, Client
from app.http.inner_call import InnerResponse
from app.warming.warmer import Warmer, WarmingServices
from tests.support.batches import json_lines
from tests.support.fakes import FakeClock
from tests.support.speaker import MODEL_ID, Served, served

pytestmark = pytest.mark.anyio

BLOCK = 32
OTHER = "fake/other"
OK = InnerResponse(
    200,
    json.dumps(
        {"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}}
    ).encode(),
)
BUSY = InnerResponse(503, b"")


def prompt(letter: str, num_blocks: int = 3) -> str:
    """Return a text that fills blocks together with what the template adds."""
    return letter * (num_blocks * BLOCK - len("user: \nassistant:"))


def line(letter: str, num_blocks: int = 3, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt(letter, num_blocks)}], **fields}


@asynccontextmanager
async def warmed(folder: Path, lines: Sequence[Any], **options: Any) -> AsyncIterator[Served]:
    """Serve a speaker that has been warmed with these lines."""
    path = folder / "warm.jsonl"
    path.write_bytes(json_lines(lines))
    async with served(warm_file=path, **options) as server:
        assert server.service.warmer is not None
        server.service.warmer.start()
        async with asyncio.timeout(20):
            await server.service.warmer.ended()
        yield server


async def num_cached(server: Served, letter: str, key: str = "") -> int:
    """Return how many tokens of a prompt are found in the cache."""
    response = await server.client.post(
        "/v1/chat/completions",
        json=line(letter, cache_salt=None),
        headers={"Authorization": f"Bearer {key}"} if key else {},
    )
    assert response.status_code == 200, response.text
    cached: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached // BLOCK * BLOCK


def states(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Return what the log says of the warming, but for the time that it took."""
    fields = [r.__dict__["fields"] for r in caplog.records if r.name == "app.warming.warmer"]
    return [{name: each[name] for name in each if name != "seconds"} for each in fields]


def ended(status: str = "completed", **counts: int) -> dict[str, Any]:
    names = ("warmed", "failed", "no_room", "prompt_tokens", "cached_tokens")
    return {"warming": status, **{name: counts.get(name, 0) for name in names}}


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="app")


async def test_prompts_are_cached_and_stay_when_others_need_the_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batch_line = {"custom_id": "b", "url": "/v1/chat/completions", "body": line("b", max_tokens=50)}
    async with warmed(tmp_path, [line("a"), batch_line], num_blocks=32) as server:
        assert states(caplog) == [
            {"warming": "in_progress"},
            ended(warmed=2, prompt_tokens=6 * BLOCK),
        ]
        assert await num_cached(server, "c") == 0
        for letter in "defghijklmno":
            await num_cached(server, letter)
        # The least recently used one of the others is gone.
        assert [await num_cached(server, letter) for letter in "abc"] == [2 * BLOCK, 2 * BLOCK, 0]
    outputs = [r.__dict__["fields"]["output"] for r in caplog.records if "request_log" in r.name]
    assert outputs[:2] == [1, 1]
    ids = [r.__dict__["fields"]["request_id"] for r in caplog.records if "request_log" in r.name]
    assert ids[:2] == ["warm_1", "warm_2"]


async def test_it_ends_where_a_model_has_no_more_room_and_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 32 blocks 8 may be pinned."""
    lines = [*map(line, "abcd"), line("e", model=OTHER), line("f", model=MODEL_ID)]
    async with warmed(tmp_path, lines, num_blocks=32, model_ids=(MODEL_ID, OTHER)) as server:
        assert states(caplog)[-1] == ended(warmed=4, no_room=2, prompt_tokens=12 * BLOCK)
        stats = await server.engine.stats()
        assert stats.num_pinned_blocks == stats.max_pinned_blocks == 8
        assert [await num_cached(server, letter) for letter in "adf"] == [2 * BLOCK, 0, 0]


@pytest.mark.parametrize(("is_shared", "num_prompts"), [(False, 2), (True, 1)])
async def test_each_key_that_has_a_cache_of_its_own_gets_the_prompts(
    is_shared: bool, num_prompts: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Lines are none of the requests that a key may send.
    limit = {"requests_per_minute": 1}
    options = {"api_keys": SecretStr("one,two,one"), "share_prefix_cache": is_shared, **limit}
    async with warmed(tmp_path, [line("a")], **options) as server:
        assert states(caplog)[-1] == ended(warmed=1, prompt_tokens=3 * BLOCK * num_prompts)
        assert [await num_cached(server, "a", key) for key in ("one", "two")] == [2 * BLOCK] * 2


async def test_a_bad_line_is_a_warning_and_the_next_one_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [b"{", line("a", model="gpt"), {"model": 5}, b"", b"x" * 9300, line("a")]
    async with warmed(tmp_path, lines, max_body_bytes=1024):
        assert states_of_end(caplog) == ended(failed=4, warmed=1, prompt_tokens=3 * BLOCK)
    where = f"MLX_SERVER_WARM_FILE: {tmp_path}/warm.jsonl"
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert [text.removeprefix(where)[:40] for text in warnings] == [
        ", line 1: this is not JSON: Expecting pr",
        ", line 2: the model 'gpt' does not exist",
        ", line 3: model: Input should be a valid",
        ", line 5: the line is longer than 9216 b",
    ]


def states_of_end(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    fields: dict[str, Any] = {**caplog.records[-1].__dict__["fields"]}
    del fields["seconds"]
    return fields


class Scripted:
    """A server that answers a request with each of these, and then holds it."""

    def __init__(self, path: Path, *responses: InnerResponse) -> None:
        self.responses = [*responses]
        self.pacer = Pacer(AdmissionController(AdmissionLimits(), FakeClock()))
        self.is_asked = asyncio.Event()
        self.warmer = Warmer(
            path,
            "the file",
            WarmingServices(
                clients=[ANONYMOUS],
                pacer=self.pacer,
                dispatch=self.dispatch,
                has_room=lambda _: True,
                max_line_bytes=1000,
            ),
        )

    async def dispatch(self, path: str, body: bytes, client: Client, name: str) -> InnerResponse:
        self.is_asked.set()
        if self.responses:
            return self.responses.pop(0)
        held: asyncio.Future[InnerResponse] = asyncio.get_running_loop().create_future()
        return await held


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "warm.jsonl"
    path.write_bytes(json_lines([line("a")]))
    return path


async def test_a_line_that_comes_at_a_bad_time_is_sent_again(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Scripted(path, BUSY, OK)
    server.warmer.start()
    async with asyncio.timeout(20):
        await server.is_asked.wait()
        server.pacer.wake()
        await server.warmer.ended()
    assert states(caplog)[-1] == ended(warmed=1, prompt_tokens=9, cached_tokens=4)
    assert server.pacer.num_taken == 0


async def test_a_stop_waits_for_no_line(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = Scripted(path)
    server.warmer.start()
    async with asyncio.timeout(20):
        await server.is_asked.wait()
        await server.warmer.close()
    assert states(caplog)[-1] == ended("cancelled")
    assert server.pacer.num_taken == 0


async def test_what_was_not_started_is_closed(path: Path) -> None:
    await Scripted(path).warmer.close()


async def test_a_file_that_is_gone_ends_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Scripted(tmp_path / "none")
    server.warmer.start()
    async with asyncio.timeout(20):
        await server.warmer.ended()
    assert "the file: FileNotFoundError (No such file or directory)" in caplog.text
    assert states_of_end(caplog) == ended("failed")
