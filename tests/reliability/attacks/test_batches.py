"""Batches of one key against another: places to run, worker threads, and the disk."""

import asyncio
import json
import threading
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import pytest
from pydantic import SecretStr

from app.storage.files import FileLimits
from batching.batch_inference import BatchInferenceEngine
from batching.request import BatchRequest
from tests.support.batches import (
    BATCHES,
    FILES,
    chat_line,
    chat_lines,
    create,
    json_lines,
    served_in,
    upload,
)
from tests.support.speaker import Served

pytestmark = pytest.mark.anyio

KEYS: Final = SecretStr("attacker,other")
LONG: Final = 20


async def has(server: Served, batch_id: str, *statuses: str) -> Any:
    """Wait until a batch of the other key has one of the statuses; return it."""
    headers = {"Authorization": "Bearer other"}
    async with asyncio.timeout(LONG):
        while True:
            batch = (await server.client.get(f"{BATCHES}/{batch_id}", headers=headers)).json()
            if batch["status"] in statuses:
                return batch


async def test_batches_that_hold_every_place_do_not_hold_up_another_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt_lengths: list[int] = []
    add = BatchInferenceEngine.add

    def watched(engine: BatchInferenceEngine, *requests: BatchRequest) -> None:
        prompt_lengths.extend(request.num_prompt_tokens for request in requests)
        add(engine, *requests)

    monkeypatch.setattr(BatchInferenceEngine, "add", watched)
    async with served_in(tmp_path, is_gated=True, api_keys=KEYS) as server:
        large = await upload(server, chat_lines(400), key="attacker")
        small = await upload(server, [chat_line("a", "x" * 99)], key="other")
        for _ in range(9):
            await create(server, large["id"], key="attacker")
        await asyncio.to_thread(server.gate.reached.wait, LONG)
        batch = await create(server, small["id"], key="other")
        # No step ends meanwhile, and so none of the other batches.
        await has(server, batch["id"], "in_progress")
        server.gate.open()
        await has(server, batch["id"], "completed")
        (turn,) = [i for i, length in enumerate(prompt_lengths) if length > 99]
    # Those in flight before it, and few of the 3,600 that wait.
    assert turn < 400


class Watched(BytesIO):
    """An input file that reports each line that is read of it.

    on_read: called with how many were read before.
    """

    def __init__(self, content: bytes, on_read: Callable[[int], None]) -> None:
        super().__init__(content)
        self.num_read = 0
        self._on_read: Final = on_read

    def readline(self, size: int | None = -1, /) -> bytes:
        self._on_read(self.num_read)
        self.num_read += 1
        return super().readline(size)


class Hold:
    """Holds the reader of a file after its first line, until it is released."""

    def __init__(self) -> None:
        self.is_reached = threading.Event()
        self.released = threading.Event()

    def __call__(self, num_read: int) -> None:
        if num_read == 1:
            self.is_reached.set()
            assert self.released.wait(LONG), "the test never releases it"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> dict[str, Watched]:
    """Return the files that are read in place of those that were uploaded, by id."""
    files: dict[str, Watched] = {}
    open_path = Path.open

    def open_(path: Path, *args: Any, **options: Any) -> Any:
        return files.get(path.name) or open_path(path, *args, **options)

    monkeypatch.setattr(Path, "open", open_)
    return files


async def test_blank_lines_count(tmp_path: Path) -> None:
    async with served_in(tmp_path, api_keys=KEYS, max_file_lines=1000) as server:
        lines = [*[b""] * 1000, chat_line("a"), *[b" "] * 5000]
        file = await upload(server, lines, key="other")
        batch = await create(server, file["id"], key="other")
        done = await has(server, batch["id"], "failed", "completed")
    assert done["status"] == "failed"
    assert done["errors"]["data"][0]["code"] == "too_many_lines"


@pytest.mark.parametrize(
    ("part", "num_parts"),
    [(b"\n", 100_000), (b"x" * 1024, 100_000), (json_lines([chat_line("a")]), 20_000)],
    ids=["blank lines", "one line", "requests"],
)
async def test_a_stop_waits_for_no_more_than_a_piece_of_an_input(
    tmp_path: Path, opened: dict[str, Watched], part: bytes, num_parts: int
) -> None:
    hold = Hold()
    async with served_in(tmp_path, max_file_lines=1 << 20, max_body_bytes=1 << 10) as server:
        file_id = (await upload(server, [{}]))["id"]
        file = opened[file_id] = Watched(part * num_parts, hold)
        await create(server, file_id)
        await asyncio.to_thread(hold.is_reached.wait, LONG)
        closing = asyncio.create_task(server.service.batches.close())
        await asyncio.sleep(0)
        hold.released.set()
        await closing
    assert file.num_read < 1200


async def test_an_input_does_not_hold_up_that_of_another_key(
    tmp_path: Path, opened: dict[str, Watched]
) -> None:
    hold = Hold()
    num_read: list[int] = []
    async with served_in(tmp_path, api_keys=KEYS, max_file_lines=40_000) as server:
        large = (await upload(server, [{}], key="attacker"))["id"]
        file = opened[large] = Watched(json_lines(chat_lines(40_000)), hold)
        await create(server, large, key="attacker")
        await asyncio.to_thread(hold.is_reached.wait, LONG)
        small = (await upload(server, [{}], key="other"))["id"]
        opened[small] = Watched(b"", lambda _: num_read.append(file.num_read))
        batch = await create(server, small, key="other")
        hold.released.set()
        await has(server, batch["id"], "failed")
    assert num_read[0] < 40_000


def wide_lines(num_lines: int) -> list[bytes]:
    """Return lines whose results are larger than they: a character of an id becomes twelve."""
    return [
        json.dumps(chat_line(f"{i} {chr(0x1F600) * 500}"), ensure_ascii=False).encode()
        for i in range(num_lines)
    ]


async def test_results_reach_a_limit_that_is_their_keys_own(tmp_path: Path) -> None:
    limit = 1 << 19
    async with served_in(tmp_path, limits=FileLimits(1 << 20, limit), api_keys=KEYS) as server:
        file = await upload(server, wide_lines(150), key="attacker")
        batches = [await create(server, file["id"], key="attacker") for _ in range(3)]
        await server.service.batches.idle()
        on_disk = [path.stat().st_size for path in (tmp_path / "batches" / "files").iterdir()]
        assert sum(on_disk) <= limit
        headers = {"Authorization": "Bearer attacker"}
        for batch in batches:
            done = (await server.client.get(f"{BATCHES}/{batch['id']}", headers=headers)).json()
            assert done["status"] == "failed"
            assert "MLX_SERVER_MAX_FILES_MIB" in done["errors"]["data"][0]["message"]
        again = await server.client.post(
            FILES,
            data={"purpose": "batch"},
            files={"file": ("a", b"x" * limit)},
            headers=headers,
        )
        assert again.status_code == 413
        small = await upload(server, wide_lines(20), key="other")
        last = await create(server, small["id"], key="other")
        assert (await has(server, last["id"], "completed"))["request_counts"]["completed"] == 20
