"""The door between two threads: rendezvous, never sleep."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from batching.config import SchedulerConfig
from batching.engine_thread import EngineThread, TokenStream
from batching.errors import (
    ContextLengthExceeded,
    EmptyPrompt,
    EngineStopped,
    InvalidRequest,
    ModelLoadError,
    RequestFailed,
)
from batching.loaded_engine import LoadedEngine
from batching.priority_queue import Priority
from batching.request import FinishReason, SamplingParams
from batching.step_plan import SliceOutput, StepPlan
from tests.fakes import VOCAB_SIZE, ByteTokenizer, TokenRunner, expected_output, loaded_engine

pytestmark = pytest.mark.anyio

CONFIG = SchedulerConfig(num_blocks=64, block_size=4, max_num_seqs=4, max_batched_tokens=16)
LIMIT = CONFIG.max_request_tokens


class GatedRunner:
    """Lets a test see a step begin, and hold it there."""

    def __init__(self, runner: TokenRunner) -> None:
        self._runner = runner
        self.is_running = threading.Event()
        self.gate = threading.Event()
        self.fail: Exception | None = None
        self.fail_reset: Exception | None = None

    def run(self, plan: StepPlan) -> list[SliceOutput]:
        self.is_running.set()
        assert self.gate.wait(20), "the test never opened the gate"
        if self.fail is not None:
            raise self.fail
        return self._runner.run(plan)

    def reset(self) -> None:
        if self.fail_reset is not None:
            raise self.fail_reset
        self._runner.reset()


def load(gated: Callable[[GatedRunner], None] = lambda _: None) -> LoadedEngine:
    def wrap(runner: TokenRunner) -> GatedRunner:
        wrapped = GatedRunner(runner)
        gated(wrapped)
        return wrapped

    return loaded_engine(CONFIG, ByteTokenizer(), wrap=wrap)


@asynccontextmanager
async def running(*, gate_is_open: bool = True) -> AsyncIterator[tuple[EngineThread, GatedRunner]]:
    runners: list[GatedRunner] = []
    thread = EngineThread(lambda: load(runners.append))
    thread.start()
    if gate_is_open:
        runners[0].gate.set()
    try:
        yield thread, runners[0]
    finally:
        runners[0].gate.set()
        await asyncio.to_thread(thread.stop)


async def collect(stream: TokenStream) -> list[int]:
    return [token async for _, output in stream for token in output.token_ids]


async def is_idle(thread: EngineThread) -> bool:
    """Ask behind everything posted before; the request must be gone by then."""
    stats = await thread.stats()
    return stats.num_running == 0 and stats.num_free_blocks == CONFIG.num_blocks


async def test_many_requests_at_once_get_each_its_own_answer() -> None:
    async with running() as (thread, _):
        prompts = [[i, *range(i % 5)] for i in range(20)]
        streams = await asyncio.gather(*(thread.submit([p], max_tokens=9) for p in prompts))
        answers = await asyncio.gather(*map(collect, streams))
        assert answers == [expected_output(p, 9) for p in prompts]
        assert await is_idle(thread)


async def test_the_last_output_says_why_it_is_the_last() -> None:
    async with running() as (thread, _):
        stop = expected_output([1, 2], 3)[-1]
        stream = await thread.submit([[1, 2]], stop_token_ids=frozenset({stop}))
        outputs = [output async for _, output in stream]
        assert [o.finish_reason for o in outputs] == [None, None, FinishReason.STOP]
        assert [item async for item in stream] == []
        stream = await thread.submit([[1, 2]], max_tokens=1)
        assert [o.finish_reason async for _, o in stream] == [FinishReason.LENGTH]


async def test_an_answer_that_is_finished_early_is_not_heard_of_again() -> None:
    async with running() as (thread, _):
        stream = await thread.submit([[1, 2]], max_tokens=3, num_choices=2)
        while not await is_idle(thread):
            pass
        # All was told before that call returned, so the stream has both answers whole.
        index, _ = await anext(stream)
        stream.finish(index)
        rest = [other async for other, _ in stream]
        assert set(rest) == {1 - index}


async def test_without_max_tokens_an_answer_fills_the_context() -> None:
    async with running() as (thread, _):
        # The prompt takes two steps, of which the first one gives no token.
        assert len(await collect(await thread.submit([[1] * 20]))) == LIMIT - 20


@pytest.mark.parametrize("num_outputs", [0, 1, 3])
async def test_closing_a_stream_frees_the_request(num_outputs: int) -> None:
    async with running() as (thread, _):
        stream = await thread.submit([[1, 2]], priority=Priority.LOW)
        for _ in range(num_outputs):
            await anext(stream)
        stream.close()
        stream.close()
        assert await is_idle(thread)


async def test_a_submit_that_is_cancelled_leaves_nothing_behind() -> None:
    async with running(gate_is_open=False) as (thread, runner):
        first = await thread.submit([[1]])
        await asyncio.to_thread(runner.is_running.wait)
        # The engine is inside a step, so this submit cannot have been served.
        task = asyncio.create_task(thread.submit([[2]]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        runner.gate.set()
        first.close()
        assert await is_idle(thread)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error", "message"),
    [
        ([], 1, EmptyPrompt, "no tokens"),
        ([1] * LIMIT, None, ContextLengthExceeded, f"you requested {LIMIT} tokens"),
        ([1], LIMIT, ContextLengthExceeded, f"{LIMIT} for the completion"),
        ([VOCAB_SIZE], 1, InvalidRequest, f"token id {VOCAB_SIZE} is not in"),
        ([1, -1], 1, InvalidRequest, "token id -1 is not in"),
    ],
)
async def test_what_can_never_be_served_is_refused_before_it_is_queued(
    prompt: list[int], max_tokens: int | None, error: type[Exception], message: str
) -> None:
    async with running() as (thread, _):
        with pytest.raises(error, match=message):
            await thread.submit([prompt], max_tokens=max_tokens)
        assert await is_idle(thread)


async def test_a_bias_for_a_token_that_does_not_exist_is_refused() -> None:
    async with running() as (thread, _):
        with pytest.raises(InvalidRequest, match="token id 99 is not in") as caught:
            await thread.submit([[1]], sampling=SamplingParams(logit_bias=((1, 2.0), (99, 1.0))))
        assert caught.value.param == "logit_bias"


async def test_a_failing_step_is_heard_by_its_streams_and_the_engine_goes_on() -> None:
    async with running(gate_is_open=False) as (thread, runner):
        stream = await thread.submit([[1]], max_tokens=3)
        runner.fail = RuntimeError("injected")
        runner.gate.set()
        with pytest.raises(RequestFailed):
            await collect(stream)
        assert [item async for item in stream] == []
        runner.fail = None
        assert thread.is_alive
        assert await collect(await thread.submit([[1]], max_tokens=3)) == expected_output([1], 3)


async def test_if_the_engine_dies_everybody_hears() -> None:
    async with running(gate_is_open=False) as (thread, runner):
        streams = [await thread.submit([[1]])]
        await asyncio.to_thread(runner.is_running.wait)
        # These wait in the inbox while the engine is inside its last step.
        late = [asyncio.create_task(thread.submit([[i]])) for i in range(3)]
        abandoned = asyncio.create_task(thread.stats())
        await asyncio.sleep(0)
        abandoned.cancel()
        await asyncio.sleep(0)
        runner.fail = runner.fail_reset = RuntimeError("injected")
        runner.gate.set()
        for stream in streams:
            with pytest.raises(EngineStopped):
                await collect(stream)
        for result in await asyncio.gather(*late, return_exceptions=True):
            assert isinstance(result, EngineStopped)
        assert not thread.is_alive
        with pytest.raises(EngineStopped):
            await thread.submit([[1]])
        streams[0].close()


async def test_stopping_ends_open_streams() -> None:
    async with running(gate_is_open=False) as (thread, runner):
        stream = await thread.submit([[1]])
        await asyncio.to_thread(runner.is_running.wait)
        for _ in range(2):
            thread.stop(timeout=0)
        runner.gate.set()
        await anext(stream)
        with pytest.raises(EngineStopped):
            await anext(stream)
        await asyncio.to_thread(thread.stop)
        assert not thread.is_alive


async def test_a_stream_closed_after_its_last_token_was_sent_hears_nothing() -> None:
    """Tokens of a step may be on their way to the loop while the client leaves."""
    async with running(gate_is_open=False) as (thread, runner):
        stream = await thread.submit([[1]], max_tokens=1)
        await asyncio.to_thread(runner.is_running.wait)
        runner.gate.set()
        stream.close()
        assert await is_idle(thread)


async def test_a_job_that_raises_does_so_where_it_was_asked() -> None:
    async with running() as (thread, _):
        with pytest.raises(ZeroDivisionError):
            await thread.call(lambda _: 1 // 0)
        assert thread.is_alive


def test_a_model_that_cannot_be_loaded_is_heard_by_who_starts_the_thread() -> None:
    def build() -> LoadedEngine:
        raise ModelLoadError("no such file")

    thread = EngineThread(build)
    with pytest.raises(ModelLoadError, match="no such file"):
        thread.start()
    assert not thread.is_alive


def test_an_event_loop_that_is_gone_is_not_told() -> None:
    """A benchmark may end its loop while the engine is in a step."""
    runners: list[GatedRunner] = []
    thread = EngineThread(lambda: load(runners.append))
    thread.start()

    async def submit() -> None:
        await thread.submit([[1]], max_tokens=1)
        await asyncio.to_thread(runners[0].is_running.wait)

    asyncio.run(submit())
    runners[0].gate.set()
    thread.stop()
    assert not thread.is_alive


def test_stopping_what_was_never_started_does_not_wait() -> None:
    EngineThread(load).stop()
