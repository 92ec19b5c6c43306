"""One thread for all models: loads in slices, steps of several engines, and their ends."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from batching import batch_inference
from batching.block_store import read_ahead
from batching.block_store.entry_file import Entry, read
from batching.block_store.keys import Fetch, Key, Kind
from batching.block_store.store import BlockStore, shared_store
from batching.config import SchedulerConfig
from batching.engine import mlx_thread
from batching.engine.async_engine import AsyncEngine
from batching.engine.load_slices import ONE_SLICE, LoadCancelled, LoadSlices
from batching.engine.loaded_engine import LoadedEngine
from batching.engine.mlx_thread import MLXThread
from batching.engine.streams.token_stream import TokenStream
from batching.errors import EngineClosed, EngineStopped, ModelLoadError, RankLost
from batching.prefix_cache import HashChain
from batching.steps.observer import Observers, StepRecord
from batching.steps.step_plan import SliceOutput, StepPlan
from tests.support.block_stores import FakeStore
from tests.support.fakes import ByteTokenizer, TokenRunner, expected_output, loaded_engine
from tests.support.requests import specs
from tests.support.stored_entries import IDENTITY, MUCH

pytestmark = pytest.mark.anyio

# A request that fills the context, for half a minute, is there as long as a test needs it.
CONFIG: Final = SchedulerConfig(
    num_blocks=8192, block_size=4, max_num_seqs=4, max_num_batched_tokens=16
)

Build = Callable[[LoadSlices], LoadedEngine]


# As long as a step takes, in seconds.  Other threads run meanwhile: steps that only computed would starve
# the event loop, and a request would fill its context before the test has looked.
STEP_SECONDS: Final = 0.001


class Steps(TokenRunner):
    """Counts its steps, in the thread that runs them."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.number = 0

    def run(self, plan: StepPlan) -> list[SliceOutput]:
        self.number += 1
        time.sleep(STEP_SECONDS)
        return super().run(plan)


def build_of(steps: Steps) -> Build:
    return lambda _: loaded_engine(CONFIG, ByteTokenizer(), wrap=lambda _: steps)


def build(slices: LoadSlices) -> LoadedEngine:
    return build_of(Steps())(slices)


@asynccontextmanager
async def running(*builds: Build) -> AsyncIterator[tuple[MLXThread, list[AsyncEngine]]]:
    thread = MLXThread()
    engines = [AsyncEngine(each, thread) for each in builds]
    for engine in engines:
        await asyncio.to_thread(engine.start)
    try:
        yield thread, engines
    finally:
        await asyncio.to_thread(thread.stop)


async def collect(stream: TokenStream) -> list[int]:
    return [token async for _, output in stream for token in output.token_ids]


class SilentStore(FakeStore):
    """Reads for a while what is lost then, and says so to none."""

    num_looks = 0

    def state_of(self, key: Key) -> Fetch:
        self.num_looks += 1
        return Fetch.READING if self.num_looks < 3 else Fetch.LOST


async def test_requests_do_not_wait_for_ever_for_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (mlx_thread, batch_inference):
        monkeypatch.setattr(module, "LOOK_INTERVAL", 0.001)
    store = SilentStore()

    def build_with_store(_: LoadSlices) -> LoadedEngine:
        return loaded_engine(CONFIG, ByteTokenizer(), store=store)

    prompt = [*range(1, 20)]
    for _ in range(2):
        async with running(build_with_store) as (_thread, (engine,)):
            found = await collect(await engine.submit(specs([prompt], max_tokens=3)))
            assert found == expected_output(prompt, 3)
            await asyncio.to_thread(until, lambda: len(store.entries) >= 4)
    assert store.num_looks >= 3


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    while not condition():
        time.sleep(STEP_SECONDS)


class Counted(Observers):
    """Counts the steps of an engine, for other threads to read."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0

    def observe_step(self, step: StepRecord) -> None:
        self.num_steps += 1


async def test_engines_of_one_thread_each_give_what_they_would_alone() -> None:
    async with running(build, build, build) as (_, engines):
        prompts = [[i, *range(i % 7)] for i in range(30)]
        streams = await asyncio.gather(
            *(engines[i % 3].submit(specs([p], max_tokens=9)) for i, p in enumerate(prompts))
        )
        outputs = await asyncio.gather(*map(collect, streams))
        assert outputs == [expected_output(p, 9) for p in prompts]


async def test_streams_go_on_between_the_slices_of_a_load() -> None:
    async with running(build) as (thread, [first]):
        first.observer = counted = Counted()
        progress: list[float] = []

        def build_slowly(slices: LoadSlices) -> LoadedEngine:
            num_before = counted.num_steps
            while counted.num_steps < num_before + 5:
                slices.pause(0.5)
                progress.append(second_load.progress)
            slices.pause()
            return build(slices)

        stream = await first.submit(specs([[1, 2]]))
        second = AsyncEngine(build_slowly, thread)
        second_load = second.begin()
        await asyncio.wrap_future(second_load.future)
        second.finish()
        assert set(progress) == {0.5}
        stream.close()
        assert await collect(await second.submit(specs([[3]], max_tokens=4))) == expected_output(
            [3], 4
        )


async def test_jobs_are_done_and_other_engines_end_between_the_slices_of_a_load() -> None:
    async with running(build, build) as (thread, [first, second]):
        is_loading, may_end = threading.Event(), threading.Event()

        def build_slowly(slices: LoadSlices) -> LoadedEngine:
            is_loading.set()
            while not may_end.is_set():
                slices.pause()
            return build(slices)

        third = AsyncEngine(build_slowly, thread)
        load = third.begin()
        await asyncio.to_thread(is_loading.wait, 20)
        prompt = [1, 2, 3]
        assert await collect(await first.submit(specs([prompt], max_tokens=5))) == expected_output(
            prompt, 5
        )
        await asyncio.wrap_future(second.end())
        assert not second.is_alive
        with pytest.raises(EngineClosed):
            await second.submit(specs([prompt]))
        may_end.set()
        await asyncio.wrap_future(load.future)
        third.finish()
        assert third.is_alive


async def test_what_uses_no_mlx_runs_in_another_thread_while_engines_run_steps() -> None:
    async with running(build) as (thread, [first]):
        first.observer = counted = Counted()
        threads: list[str] = []

        def wait_for_steps() -> str:
            threads.append(threading.current_thread().name)
            num_before = counted.num_steps
            until(lambda: counted.num_steps >= num_before + 5)
            return "tokenizer"

        def fail() -> None:
            raise ModelLoadError("no tokenizer")

        def build_slowly(slices: LoadSlices) -> LoadedEngine:
            assert slices.in_thread(wait_for_steps) == "tokenizer"
            with pytest.raises(ModelLoadError, match="no tokenizer"):
                slices.in_thread(fail)
            threads.append(threading.current_thread().name)
            return build(slices)

        stream = await first.submit(specs([[1, 2]]))
        second = AsyncEngine(build_slowly, thread)
        await asyncio.to_thread(second.start)
        stream.close()
        assert threads == ["mlx-load", "mlx"]


async def test_a_load_does_not_block_the_thread_where_there_is_no_engine_either() -> None:
    threads: list[str] = []

    def build_alone(slices: LoadSlices) -> LoadedEngine:
        threads.append(slices.in_thread(lambda: threading.current_thread().name))
        slices.pause()
        return build(slices)

    async with running(build_alone):
        assert threads == ["mlx-load"]


async def test_a_load_that_is_cancelled_ends_at_its_next_pause() -> None:
    async with running(build) as (thread, [first]):
        is_loading, has_ended = threading.Event(), threading.Event()

        def build_slowly(slices: LoadSlices) -> LoadedEngine:
            is_loading.set()
            try:
                while True:
                    slices.pause()
            finally:
                has_ended.set()

        load = AsyncEngine(build_slowly, thread).begin()
        waiting = AsyncEngine(build, thread).begin()
        await asyncio.to_thread(is_loading.wait, 20)
        for each in (waiting, load):
            each.cancel()
        for each in (load, waiting):
            with pytest.raises(LoadCancelled):
                await asyncio.wrap_future(each.future)
        assert has_ended.is_set()
        assert await collect(await first.submit(specs([[1]], max_tokens=3))) == expected_output(
            [1], 3
        )


async def test_stopping_ends_a_load_and_fails_those_that_wait() -> None:
    is_loading = threading.Event()

    def build_slowly(slices: LoadSlices) -> LoadedEngine:
        is_loading.set()
        while True:
            slices.pause()

    async with running(build) as (thread, _):
        load = AsyncEngine(build_slowly, thread).begin()
        waiting = AsyncEngine(build, thread).begin()
        await asyncio.to_thread(is_loading.wait, 20)
        await asyncio.to_thread(thread.stop)
        assert isinstance(load.future.exception(), LoadCancelled)
        assert isinstance(waiting.future.exception(), EngineClosed)
        assert thread.has_ended
        with pytest.raises(EngineClosed):
            AsyncEngine(build, thread).begin()


class Broken(TokenRunner):
    """Fails, and cannot be made usable again."""

    def run(self, plan: StepPlan) -> list[SliceOutput]:
        raise RuntimeError("injected")

    def reset(self) -> None:
        if hasattr(self, "_pool"):
            raise RuntimeError("injected")
        super().reset()


async def test_an_engine_that_fails_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    closed: list[str] = []

    def build_broken(slices: LoadSlices) -> LoadedEngine:
        loaded = loaded_engine(CONFIG, ByteTokenizer(), wrap=lambda _: Broken(CONFIG))
        return LoadedEngine(loaded.engine, loaded.model, close=lambda: closed.append("broken"))

    async with running(build, build_broken) as (_, [good, broken]):
        stream = await good.submit(specs([[1, 2]], max_tokens=30))
        failing = await broken.submit(specs([[1, 2]], max_tokens=30))
        with pytest.raises(EngineStopped):
            await collect(failing)
        assert await collect(stream) == expected_output([1, 2], 30)
        assert (good.is_alive, broken.is_alive) == (True, False)
        assert broken.health.unhealthy_reason == "the engine has stopped"
        # Its memory is given back, once.
        await asyncio.wrap_future(broken.end())
        assert closed == ["broken"]
        with pytest.raises(EngineStopped):
            await broken.stats()
    assert "an engine failed and stops" in caplog.text


@dataclass
class Lost:
    """A runner that has lost a rank, without which no step can be computed."""

    rank: int

    def run(self, plan: StepPlan) -> list[SliceOutput]:
        raise RankLost(self.rank, "is gone")

    def reset(self) -> None:
        """Nothing is left."""


@pytest.mark.parametrize(("rank", "is_said_here"), [(0, True), (2, False)])
async def test_an_engine_that_ends_on_purpose_says_why_if_nothing_else_has(
    caplog: pytest.LogCaptureFixture, rank: int, *, is_said_here: bool
) -> None:
    def build_lost(slices: LoadSlices) -> LoadedEngine:
        return loaded_engine(CONFIG, ByteTokenizer(), wrap=lambda _: Lost(rank))

    async with running(build_lost) as (_, [engine]):
        stream = await engine.submit(specs([[1, 2]]))
        with pytest.raises(RankLost, match=f"rank {rank} is gone"):
            await collect(stream)
        with pytest.raises(RankLost):
            await engine.stats()
    assert (f"an engine stops: rank {rank} is gone" in caplog.text) == is_said_here
    assert "Traceback" not in caplog.text


def fail(*_: object) -> None:
    raise SystemExit


async def test_a_thread_that_fails_fails_all_engines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(build) as (thread, [engine]):
        stream = await engine.submit(specs([[1, 2]]))

        thread._do_jobs = fail  # type: ignore[method-assign]
        with pytest.raises(EngineStopped, match="the engine has stopped"):
            await collect(stream)
        assert not engine.is_alive
    assert "the MLX thread failed" in caplog.text


async def test_a_second_start_is_none_and_what_never_started_stops() -> None:
    async with running(build) as (thread, [engine]):
        thread.start()
        assert await collect(await engine.submit(specs([[5]], max_tokens=2))) == expected_output(
            [5], 2
        )
    MLXThread().stop()


async def test_an_engine_that_was_never_loaded_has_nothing_to_end() -> None:
    async with running(build) as (thread, _):
        never = AsyncEngine(build, thread)
        never.stop()
        assert never.end().done()


def test_a_load_of_one_slice_goes_on() -> None:
    ONE_SLICE.pause(0.5)
    assert ONE_SLICE.in_thread(lambda: 3) == 3


async def test_a_job_that_was_cancelled_before_the_thread_ended_is_not_failed() -> None:
    is_loading, may_end = threading.Event(), threading.Event()

    def build_in_one_slice(slices: LoadSlices) -> LoadedEngine:
        is_loading.set()
        assert may_end.wait(20)
        raise SystemExit

    thread = MLXThread()
    load = AsyncEngine(build_in_one_slice, thread).begin()
    await asyncio.to_thread(is_loading.wait, 20)
    thread.stop(timeout=0)
    cancelled, waiting = thread.post(lambda: 1), thread.post(lambda: 2)
    cancelled.cancel()
    may_end.set()
    await asyncio.to_thread(thread.stop)
    assert isinstance(load.future.exception(), SystemExit)
    assert cancelled.cancelled()
    assert isinstance(waiting.exception(), EngineClosed)


async def test_stopping_while_a_thread_of_the_load_runs_ends_the_load() -> None:
    is_waiting, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        is_waiting.set()
        assert may_end.wait(20)

    def build_slowly(slices: LoadSlices) -> LoadedEngine:
        slices.in_thread(wait)
        raise AssertionError("the load has ended before")

    async with running(build) as (thread, _):
        load = AsyncEngine(build_slowly, thread).begin()
        await asyncio.to_thread(is_waiting.wait, 20)
        await asyncio.to_thread(thread.stop)
        assert isinstance(load.future.exception(), LoadCancelled)
        may_end.set()


class Ticking:
    """A clock by which a second passes each time that it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


async def test_the_time_that_an_engine_has_had_alone_is_not_held_against_it() -> None:
    """A load, and then another engine, gets no more than its share from then on."""
    first, second = Steps(), Steps()
    shares: list[int] = []

    def build_in_slices(slices: LoadSlices) -> LoadedEngine:
        before = first.number
        for _ in range(100):
            slices.pause()
        shares.append(first.number - before)
        return build(slices)

    thread = MLXThread(Ticking())
    engines = [AsyncEngine(each, thread) for each in (build_of(first), build_of(second))]
    await asyncio.to_thread(engines[0].start)
    stream = await engines[0].submit(specs([[1, 2]]))
    while first.number < 300:
        await anext(stream)
    await asyncio.to_thread(AsyncEngine(build_in_slices, thread).start)
    await asyncio.to_thread(engines[1].start)
    competing = await engines[1].submit(specs([[3]]))
    before = first.number
    while second.number < 100:
        await anext(competing)
    shares.append(first.number - before)
    for each in (stream, competing):
        each.close()
    await asyncio.to_thread(thread.stop)
    assert all(share >= 20 for share in shares)


async def test_an_engine_whose_statistics_fail_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with running(build, build) as (_, [good, broken]):
        assert broken._served is not None
        broken._served.engine.stats = fail  # type: ignore[assignment, method-assign]
        stream = await good.submit(specs([[1, 2]], max_tokens=30))
        with pytest.raises(EngineStopped):
            await collect(await broken.submit(specs([[1, 2]], max_tokens=30)))
        assert await collect(stream) == expected_output([1, 2], 30)
        assert (good.is_alive, broken.is_alive) == (True, False)
    assert "an engine failed and stops" in caplog.text


async def test_an_engine_that_cannot_be_closed_is_gone_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def build_sticky(slices: LoadSlices) -> LoadedEngine:
        loaded = build(slices)
        return LoadedEngine(loaded.engine, loaded.model, close=fail)

    async with running(build, build_sticky) as (_, [good, sticky]):
        await asyncio.wrap_future(sticky.end())
        assert (good.is_alive, sticky.is_alive) == (True, False)
    assert "an engine could not be closed" in caplog.text


async def test_a_load_that_is_queued_as_the_thread_ends_fails() -> None:
    entered, leave = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        assert leave.wait(20)

    thread = MLXThread()
    thread.start()
    thread.post(wait)
    await asyncio.to_thread(entered.wait, 20)
    thread.stop(timeout=0)
    load = AsyncEngine(build, thread).begin()
    leave.set()
    with pytest.raises(EngineClosed):
        await asyncio.wrap_future(load.future)
    await asyncio.to_thread(thread.stop)


# Two blocks that a hit may have.
PROMPT: Final = [*range(1, 10)]


class HeldStores:
    """Opens stores in a folder whose readers wait before each file."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self.may_read = threading.Event()
        monkeypatch.setattr(read_ahead, "read", self._read)

    def open(self) -> BlockStore:
        return shared_store(self._folder, MUCH, None, IDENTITY)

    def _read(self, path: Path, identity: str, key: Key) -> Entry:
        assert self.may_read.wait(20)
        return read(path, identity, key)


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HeldStores:
    return HeldStores(tmp_path, monkeypatch)


def build_with(store: BlockStore) -> Build:
    return lambda _: loaded_engine(CONFIG, ByteTokenizer(), store=store)


async def filled(stores: HeldStores) -> BlockStore:
    """Return a store with what an engine has left there that was ended in the middle of a stream."""
    store = stores.open()
    async with running(build_with(store)) as (_, [engine]):
        stream = await engine.submit(specs([PROMPT]))
        assert (await anext(stream))[0] == 0
    await asyncio.to_thread(store.close)
    return stores.open()


async def waits(engine: AsyncEngine) -> None:
    """Return when the engine has admitted its request, which waits for the store."""
    while not (await engine.stats()).num_running:
        pass


async def test_an_engine_goes_on_when_its_store_has_read(stores: HeldStores) -> None:
    store = await filled(stores)
    async with running(build_with(store)) as (_, [engine]):
        stream = await engine.submit(specs([PROMPT], max_tokens=5))
        await waits(engine)
        stores.may_read.set()
        assert await collect(stream) == expected_output(PROMPT, 5)
        assert stream.sequences[0].num_cached_tokens == 8
    # What is read once the thread has ended wakes no one.
    key = Key(Kind.BLOCK, HashChain().extended(PROMPT, CONFIG.block_size)[0])
    store.fetch([key])
    while store.state_of(key) is Fetch.READING:
        pass
    await asyncio.to_thread(store.close)
    assert store.state_of(key) is Fetch.READY


async def test_an_engine_that_has_ended_before_its_store_has_read_is_left_alone(
    stores: HeldStores,
) -> None:
    store = await filled(stores)
    async with running(build, build_with(store)) as (_, [other, engine]):
        stream = await engine.submit(specs([PROMPT], max_tokens=5))
        await waits(engine)
        await asyncio.wrap_future(engine.end())
        stores.may_read.set()
        await asyncio.to_thread(store.close)
        with pytest.raises(EngineClosed):
            await collect(stream)
        assert await collect(await other.submit(specs([PROMPT], max_tokens=5))) == expected_output(
            PROMPT, 5
        )
