"""An engine is watched by any number of clients, and by none at no cost."""

import asyncio
import json
from typing import Any

import pytest

from app.observability import machine_room
from app.observability.engine_frame import EngineCounts, encode_frame
from app.observability.machine_room import EngineWatch, MachineRoom
from batching import AsyncEngine
from tests.support.speaker import Served, served, served_endlessly

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _no_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_room, "INTERVAL", 0.0)


def parsed(frame: bytes) -> Any:
    assert frame.startswith(b"data: ") and frame.endswith(b"\n\n")
    return json.loads(frame.removeprefix(b"data: "))


async def running(server: Served) -> asyncio.Task[Any]:
    """Start a request, and return once it has its first token."""
    task = asyncio.create_task(server.chat("the secret of the request", max_tokens=4))
    await asyncio.to_thread(server.gate.reached.wait, 20)
    return task


async def test_all_watchers_get_the_same_frames() -> None:
    async with served() as server:
        watch = EngineWatch(server.engine)
        one, two = watch.watch(), watch.watch()
        frames, others = one.frames(), two.frames()
        pair = await asyncio.gather(anext(frames), anext(others))
        assert pair[0] is pair[1]
        # One that leaves does not end it for the others.
        one.close()
        one.close()
        assert parsed(await anext(others))["stats"]["num_running"] == 0
        two.close()
        assert watch.num_watchers == 0


async def test_a_frame_has_what_runs_and_no_text() -> None:
    async with served_endlessly(max_num_seqs=2) as server:
        watch = EngineWatch(server.engine)
        watcher = watch.watch()
        frames = watcher.frames()
        await anext(frames)
        task = await running(server)
        server.gate.open()
        await task
        text = await anext(frames)
        watcher.close()
    frame = parsed(text)
    assert b"secret" not in text
    assert frame["unhealthy_reason"] is None
    assert frame["running"] == frame["waiting"] == []
    assert frame["is_map_whole"] is True
    counts = frame["counts"]
    assert counts["num_output_tokens"] == 4
    assert counts["num_prompt_tokens"] > 0
    assert counts["num_steps"] >= 4
    assert set(counts["first_tokens"]) == {"p50", "p95"}


async def test_without_watchers_nothing_is_counted_and_no_task_runs() -> None:
    async with served() as server:
        before = server.engine.observer
        watch = EngineWatch(server.engine)
        num_tasks = len(asyncio.all_tasks())
        for _ in range(2):
            watcher = watch.watch()
            assert server.engine.observer is not before
            assert parsed(await anext(watcher.frames()))["counts"]["num_steps"] == 0
            watcher.close()
            assert server.engine.observer is before
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == num_tasks


async def test_frames_end_with_the_engine() -> None:
    async with served() as server:
        watch = EngineWatch(server.engine)
        watcher = watch.watch()
        server.manager.close()
        assert [frame async for frame in watcher.frames()] == []
        # Also for one that begins to read later.
        assert [frame async for frame in watcher.frames()] == []


async def test_a_room_has_one_watch_for_each_engine() -> None:
    async with served(model_ids=("a", "b")) as server:
        engines: list[AsyncEngine] = [server.manager.get(name) for name in ("a", "b")]
        room = MachineRoom()
        watchers = [room.watch(engine) for engine in (*engines, engines[0])]
        assert room.num_watchers == 3
        for watcher in watchers:
            watcher.close()
        assert room.num_watchers == 0


async def test_a_frame_of_an_engine_with_requests() -> None:
    async with served_endlessly() as server:
        task = await running(server)
        waiting = asyncio.create_task(server.engine.snapshot())
        # It asks before the step that waits at the gate goes on: the others may follow at once.
        await asyncio.sleep(0)
        server.gate.open()
        frame = parsed(encode_frame(await waiting, EngineCounts(0, 0, 0, 0.0, ()), "it is late"))
        await task
    [request] = frame["running"]
    assert request["status"] in ("prefilling", "running")
    assert request["priority"] == "normal"
    assert request["max_tokens"] == 4
    assert len(request["blocks"]) == 2
    num_used = request["blocks"][1]
    assert sum(frame["empty_blocks"][1::2]) + num_used == frame["stats"]["num_blocks"]
    assert frame["unhealthy_reason"] == "it is late"
    assert frame["counts"]["first_tokens"] is None
