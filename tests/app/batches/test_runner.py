"""The runner's beginning and end."""

import asyncio
import threading
from pathlib import Path

import pytest

from app.storage.files import Draft
from tests.support.batches import chat_lines, create, ended, served_in, upload

pytestmark = pytest.mark.anyio


async def test_what_is_closed_before_it_begins_ends(tmp_path: Path) -> None:
    """As at a signal right after the start: tasks are cancelled that have never run."""
    async with served_in(tmp_path) as server:
        batches = server.service.batches
        batches.wake()
        async with asyncio.timeout(20):
            await batches.close()


async def test_a_run_that_is_closed_as_it_begins_is_left_to_the_next_start(tmp_path: Path) -> None:
    async with served_in(tmp_path) as server:
        batches = server.service.batches
        batch = await create(server, (await upload(server, chat_lines(1)))["id"])
        async with asyncio.timeout(20):
            # No longer than that: its task has not begun, or has only just.
            while not batches.num_running:  # noqa: ASYNC110
                await asyncio.sleep(0)
            await batches.close()
        assert batches.num_running == 0
    async with served_in(tmp_path) as server:
        server.service.batches.wake()
        assert (await ended(server, batch["id"]))["request_counts"]["completed"] == 1


async def test_a_stop_waits_for_no_more_than_a_piece_of_an_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.batches.output._PIECE", 1)
    begun, go_on = threading.Event(), threading.Event()
    num_written = 0
    write = Draft.write

    def hold(draft: Draft, data: bytes) -> None:
        nonlocal num_written
        num_written += 1
        begun.set()
        assert go_on.wait(20)
        write(draft, data)

    async with served_in(tmp_path) as server:
        file = await upload(server, chat_lines(30))
        with monkeypatch.context() as patch:
            patch.setattr(Draft, "write", hold)
            batch = await create(server, file["id"])
            await asyncio.to_thread(begun.wait, 20)
            closing = asyncio.create_task(server.service.batches.close())
            await asyncio.sleep(0)
            go_on.set()
            await closing
        assert num_written == 1
        assert [path.name for path in (tmp_path / "batches" / "files").iterdir()] == [file["id"]]
    async with served_in(tmp_path) as server:
        server.service.batches.wake()
        assert (await ended(server, batch["id"]))["request_counts"]["completed"] == 30
