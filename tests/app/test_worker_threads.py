"""The threads of requests: never more of them, and no wait for one is in vain."""

import asyncio
import threading

import pytest

from app.worker_threads import WorkerThreads
from batching.sandbox.interruption import interruptible
from tests.support.busy_threads import busy

pytestmark = pytest.mark.anyio


async def test_it_returns_what_the_function_returns_or_raises() -> None:
    threads = WorkerThreads(1)
    assert await threads.run(lambda: "done") == "done"
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)


async def test_who_leaves_while_all_are_busy_is_forgotten() -> None:
    threads, calls = WorkerThreads(2), list[str]()
    async with busy(threads):
        task = asyncio.create_task(threads.run(lambda: calls.append("left")))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await threads.run(lambda: calls.append("stayed"))
    assert calls == ["stayed"]


async def test_who_leaves_work_that_goes_on_does_not_wait_for_it_and_others_do() -> None:
    threads, calls = WorkerThreads(1), list[str]()
    begun, may_end = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert may_end.wait(20), "the caller waited for it"
        calls.append("work")

    task = asyncio.create_task(threads.run(work))
    await asyncio.to_thread(begun.wait, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    other = asyncio.create_task(threads.run(lambda: calls.append("other")))
    await asyncio.sleep(0)
    assert calls == []
    may_end.set()
    await other
    assert calls == ["work", "other"]


async def test_a_wait_for_a_process_ends_with_its_caller() -> None:
    threads, begun, killed = WorkerThreads(1), threading.Event(), threading.Event()

    def wait() -> None:
        with interruptible(killed.set):
            begun.set()
            assert killed.wait(20), "it is not interrupted"

    task = asyncio.create_task(threads.run(wait))
    await asyncio.to_thread(begun.wait, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # The thread is free again, although nothing else has ended the wait.
    assert await threads.run(killed.is_set)


async def test_one_key_leaves_a_thread_for_the_others() -> None:
    threads, has_ended = WorkerThreads(2, per_key=1), threading.Event()
    own = [asyncio.create_task(threads.run(lambda: has_ended.wait(20), "a")) for _ in range(3)]
    await asyncio.sleep(0)
    assert await threads.run(lambda: "served", "b") == "served"
    has_ended.set()
    assert await asyncio.gather(*own) == [True, True, True]


def test_work_may_outlive_its_loop() -> None:
    threads, begun, may_end = WorkerThreads(1), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait(20)

    async def leave() -> None:
        task = asyncio.create_task(threads.run(work))
        await asyncio.to_thread(begun.wait, 20)
        task.cancel()

    asyncio.run(leave())
    may_end.set()
    assert asyncio.run(WorkerThreads(1).run(lambda: "served")) == "served"
