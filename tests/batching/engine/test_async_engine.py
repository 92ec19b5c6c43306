"""The bridge between two threads: rendezvous, never sleep."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from time import monotonic

import pytest

from batching.config import SchedulerConfig
from batching.engine.async_engine import AsyncEngine
from batching.engine.load_slices import LoadSlices
from batching.engine.loaded_engine import LoadedEngine
from batching.engine.streams.stream_router import StreamRouter
from batching.engine.streams.token_stream import Backlog, TokenStream
from batching.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EmptyPrompt,
    EngineClosed,
    EngineStalled,
    EngineStopped,
    InvalidRequest,
    ModelLoadError,
    RequestFailed,
    SlowReader,
)
from batching.inputs.images import PlacedImage
from batching.inputs.sampling_params import SamplingParams
from batching.priority_queue import Priority
from batching.steps.observer import NewTokens, Observers, SequenceStats, StepRecord
from batching.steps.stats import SchedulerStats
from batching.steps.step_plan import SliceOutput, StepPlan
from batching.steps.token_output import FinishReason, TokenLogprobs, TokenOutput
from tests.support.fakes import (
    VOCAB_SIZE,
    ByteTokenizer,
    FakeClock,
    TokenRunner,
    expected_output,
    loaded_engine,
)
from tests.support.requests import image_of, specs

pytestmark = pytest.mark.anyio

CONFIG = SchedulerConfig(num_blocks=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=16)
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
async def running(
    *,
    gate_is_open: bool = True,
    step_timeout: float = 60.0,
    clock: Callable[[], float] = monotonic,
) -> AsyncIterator[tuple[AsyncEngine, GatedRunner]]:
    runners: list[GatedRunner] = []
    thread = AsyncEngine(lambda _: load(runners.append), step_timeout=step_timeout, clock=clock)
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


async def is_idle(thread: AsyncEngine) -> bool:
    """Ask behind everything posted before; the request must be gone by then."""
    stats = await thread.stats()
    return stats.num_running == 0 and stats.num_free_blocks == CONFIG.num_blocks


async def test_concurrent_requests_get_each_their_own_completion() -> None:
    async with running() as (thread, _):
        prompts = [[i, *range(i % 5)] for i in range(20)]
        streams = await asyncio.gather(*(thread.submit(specs([p], max_tokens=9)) for p in prompts))
        outputs = await asyncio.gather(*map(collect, streams))
        assert outputs == [expected_output(p, 9) for p in prompts]
        assert await is_idle(thread)


async def test_the_last_output_says_why_it_is_the_last() -> None:
    async with running() as (thread, _):
        stop = expected_output([1, 2], 3)[-1]
        stream = await thread.submit(specs([[1, 2]], stop_token_ids=frozenset({stop})))
        outputs = [output async for _, output in stream]
        assert [o.finish_reason for o in outputs] == [None, None, FinishReason.STOP]
        assert [item async for item in stream] == []
        stream = await thread.submit(specs([[1, 2]], max_tokens=1))
        assert [o.finish_reason async for _, o in stream] == [FinishReason.LENGTH]


async def test_a_sequence_that_is_finished_early_yields_nothing_more() -> None:
    async with running() as (thread, _):
        stream = await thread.submit(specs([[1, 2]], max_tokens=3, num_choices=2))
        while not await is_idle(thread):
            pass
        # All was delivered before that call returned, so the stream has both sequences whole.
        index, _ = await anext(stream)
        stream.finish(index)
        rest = [other async for other, _ in stream]
        assert set(rest) == {1 - index}


async def test_without_max_tokens_a_completion_fills_the_context() -> None:
    async with running() as (thread, _):
        # The prompt takes two steps, of which the first one gives no token.
        assert len(await collect(await thread.submit(specs([[1] * 20])))) == LIMIT - 20


async def test_the_progress_of_a_prefill_is_reported_on_request() -> None:
    async with running() as (thread, _):
        stream = await thread.submit(specs([[1] * 20], max_tokens=1, reports_progress=True))
        outputs = [(o.num_read_tokens, len(o.token_ids)) async for _, o in stream]
        assert outputs == [(16, 0), (0, 1)]


@pytest.mark.parametrize("num_outputs", [0, 1, 3])
async def test_closing_a_stream_frees_the_request(num_outputs: int) -> None:
    async with running() as (thread, _):
        stream = await thread.submit(specs([[1, 2]], priority=Priority.LOW))
        for _ in range(num_outputs):
            await anext(stream)
        stream.close()
        stream.close()
        assert await is_idle(thread)


async def test_a_submit_that_is_cancelled_leaves_nothing_behind() -> None:
    async with running(gate_is_open=False) as (thread, runner):
        first = await thread.submit(specs([[1]]))
        await asyncio.to_thread(runner.is_running.wait)
        # The engine is inside a step, so this submit cannot have been served.
        task = asyncio.create_task(thread.submit(specs([[2]])))
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
async def test_what_can_never_be_served_is_rejected_by_the_check(
    prompt: list[int], max_tokens: int | None, error: type[Exception], message: str
) -> None:
    async with running() as (thread, _):
        with pytest.raises(error, match=message):
            thread.check(specs([[1], prompt], max_tokens=max_tokens))


async def test_a_bias_for_an_unknown_token_is_rejected() -> None:
    async with running() as (thread, _):
        sampling = SamplingParams(logit_bias=((1, 2.0), (99, 1.0)))
        with pytest.raises(InvalidRequest, match="token id 99 is not in") as caught:
            thread.check(specs([[1]], max_tokens=1, sampling=sampling))
        assert caught.value.param == "logit_bias"


async def test_an_image_of_which_a_step_would_not_hold_the_rows_is_rejected() -> None:
    async with running() as (thread, _):
        image = PlacedImage(0, image_of(b"cat", 3, sees_ahead=True))
        asked = specs([image.image.token_ids], max_tokens=1, images=(image,))
        with pytest.raises(InvalidRequest, match="3 tokens that see each other; the limit is 0"):
            thread.check(asked)


async def test_a_failed_step_raises_in_its_streams_and_the_engine_continues() -> None:
    async with running(gate_is_open=False) as (thread, runner):
        stream = await thread.submit(specs([[1]], max_tokens=3))
        runner.fail = RuntimeError("injected")
        runner.gate.set()
        with pytest.raises(RequestFailed):
            await collect(stream)
        assert [item async for item in stream] == []
        runner.fail = None
        assert thread.is_alive
        assert await collect(await thread.submit(specs([[1]], max_tokens=3))) == expected_output(
            [1], 3
        )


async def test_three_failed_steps_are_unhealthy_until_a_completion_is_finished() -> None:
    async with running() as (thread, runner):
        runner.fail = RuntimeError("injected")
        for _ in range(3):
            assert thread.health.unhealthy_reason is None
            with pytest.raises(RequestFailed):
                await collect(await thread.submit(specs([[1]])))
        assert thread.health.unhealthy_reason == "3 steps failed since a completion was finished"
        runner.fail = None
        await collect(await thread.submit(specs([[1]], max_tokens=1)))
        assert thread.health.unhealthy_reason is None
        await asyncio.to_thread(thread.stop)
        assert thread.health.unhealthy_reason == "the engine has stopped"


def test_a_completion_that_its_caller_finishes_is_a_finished_one() -> None:
    router = StreamRouter(0.0)
    router.num_failed_steps = 3
    ends = {
        FinishReason.ABORT: 3,
        FinishReason.TIMEOUT: 3,
        FinishReason.ERROR: 3,
        # At a stop string.
        FinishReason.STOP: 0,
    }
    for reason, num_failed_steps in ends.items():
        router.open(TokenStream([new_sequence()], lambda *_: None), [1])
        router.end(1, reason, 0.0)
        assert router.num_failed_steps == num_failed_steps


async def test_a_request_past_its_deadline_ends_in_any_state() -> None:
    async with running(gate_is_open=False) as (thread, runner):
        # In the step, and in the inbox behind it.
        running_one = await thread.submit(specs([[1]], time_limit=0.05))
        await asyncio.to_thread(runner.is_running.wait)
        with pytest.raises(DeadlineExceeded):
            await thread.submit(specs([[2]], time_limit=0.01))
        with pytest.raises(DeadlineExceeded):
            await collect(running_one)
        (sequence,) = running_one.sequences
        assert sequence.finish_reason is FinishReason.TIMEOUT
        runner.gate.set()
        assert await is_idle(thread)


def new_sequence() -> SequenceStats:
    return SequenceStats(
        num_prompt_tokens=1, max_tokens=9, num_choices=1, priority=Priority.LOW, arrival_time=0.0
    )


async def test_tokens_of_a_finished_sequence_that_were_on_their_way_are_dropped() -> None:
    stream = TokenStream([new_sequence(), new_sequence()], lambda *_: None)
    for index in (0, 0, 1):
        stream.put(index, TokenOutput((1,), None, 0))
    assert (await anext(stream))[0] == 0
    # A stop string, say.
    stream.finish(0)
    assert (await anext(stream))[0] == 1


async def test_a_failure_of_a_finished_sequence_ends_no_other() -> None:
    stream = TokenStream([new_sequence(), new_sequence()], lambda *_: None)
    stream.put(0, TokenOutput((1,), None, 0))
    # Of the step after that, which ended before the caller saw the stop string.
    stream.put(0, RequestFailed())
    stream.put(1, TokenOutput((2,), FinishReason.LENGTH, 0))
    await anext(stream)
    stream.finish(0)
    assert [index async for index, _ in stream] == [1]


async def test_a_finished_sequence_does_not_hide_the_deadline() -> None:
    stream = TokenStream([new_sequence(), new_sequence()], lambda *_: None)
    stream.finish(0)
    # As the timer does.
    stream.put(0, DeadlineExceeded())
    with pytest.raises(DeadlineExceeded):
        await anext(stream)


async def test_a_stream_with_tokens_always_ready_ends_at_its_deadline_too() -> None:
    released: list[tuple[int, FinishReason]] = []
    over = asyncio.get_running_loop().time()
    stream = TokenStream([new_sequence()], lambda *ended: released.append(ended), deadline=over)
    stream.put(0, TokenOutput((1,), None, 0))
    with pytest.raises(DeadlineExceeded):
        await anext(stream)
    assert released == [(0, FinishReason.TIMEOUT)]


async def test_the_stream_that_holds_most_ends_when_too_much_is_unread() -> None:
    backlog, released = Backlog(max_unread=12), list[tuple[int, FinishReason]]()
    read = TokenStream([new_sequence()], lambda *_: None, backlog=backlog)
    slow = TokenStream(
        [new_sequence(), new_sequence()], lambda *ended: released.append(ended), backlog=backlog
    )
    one = TokenOutput((1,), None, 0)
    with_logprobs = one._replace(logprobs=(TokenLogprobs(-1.0, ((2, -2.0), (3, -3.0))),))
    for _ in range(20):
        read.put(0, one)
        assert await anext(read) == (0, one)
    for _ in range(2):
        slow.put(0, with_logprobs)
    read.put(0, one)
    assert released == []
    read.put(0, one)
    assert released == [(0, FinishReason.ABORT), (1, FinishReason.ABORT)]
    with pytest.raises(SlowReader):
        await anext(slow)
    for _ in range(2):
        assert await anext(read) == (0, one)


async def test_a_stream_that_is_closed_holds_nothing() -> None:
    backlog = Backlog(max_unread=4)
    first, second = (
        TokenStream([new_sequence()], lambda *_: None, backlog=backlog) for _ in range(2)
    )
    one = TokenOutput((1,), None, 0)
    # Its caller is woken up for an output when it is closed.
    waiting = asyncio.ensure_future(anext(first))
    await asyncio.sleep(0)
    first.put(0, one)
    first.close()
    with pytest.raises(StopAsyncIteration):
        await waiting
    for _ in range(2):
        second.put(0, one)
    for _ in range(2):
        assert await anext(second) == (0, one)


async def test_what_is_held_back_comes_with_the_last_output_and_not_before_an_error() -> None:
    sequences = [new_sequence(), new_sequence()]
    stream = TokenStream(sequences, lambda *_: None)
    stream.hold_back()

    def put(index: int, *token_ids: int, reason: FinishReason | None = None) -> None:
        output = TokenOutput(token_ids, reason, 0, logprobs=tuple(map(logprobs, token_ids)))
        sequences[index].record(output, 0.0)
        stream.put(index, output)

    def logprobs(token_id: int) -> TokenLogprobs:
        return TokenLogprobs(-float(token_id))

    put(0)
    put(0, 1)
    put(1, 9, reason=FinishReason.STOP)
    put(0, 2)
    put(0)
    put(0, 3, 4)
    put(0, 5, reason=FinishReason.LENGTH)
    outputs = [(index, output.token_ids, output.logprobs) async for index, output in stream]
    assert [(index, ids) for index, ids, _ in outputs] == [
        (0, ()),
        (0, (1,)),
        (1, (9,)),
        (0, (2, 3, 4, 5)),
    ]
    assert outputs[-1][2] == (logprobs(2), logprobs(3), logprobs(4), logprobs(5))

    failing = TokenStream([new_sequence()], lambda *_: None)
    failing.hold_back()
    failing.put(0, RequestFailed())
    with pytest.raises(RequestFailed):
        await anext(failing)


async def test_a_stalled_step_is_detected_and_no_request_waits_for_it() -> None:
    async with running(gate_is_open=False, step_timeout=0.02) as (thread, runner):
        assert not thread.health.is_stalled
        thread.observer = watcher = Watcher()
        stream = await thread.submit(specs([[1]]))
        await asyncio.to_thread(runner.is_running.wait)
        with pytest.raises(EngineStalled):
            await thread.submit(specs([[2]]))
        assert thread.health.is_stalled
        assert thread.health.unhealthy_reason is not None
        assert thread.health.unhealthy_reason.startswith("a step of the model has not ended for ")
        # Rejected at once now, without waiting.
        with pytest.raises(EngineStalled):
            await thread.submit(specs([[3]]))
        thread.fail_streams(EngineStalled())
        with pytest.raises(EngineStalled):
            await collect(stream)
        assert watcher.ended[-1] is stream.sequences[0]
        assert watcher.ended[-1].finish_reason is FinishReason.ERROR
        runner.gate.set()
        assert await is_idle(thread)
        assert thread.health.unhealthy_reason is None


async def test_a_wait_that_is_longer_than_the_step_is_waited_on() -> None:
    """As after a pause of the process, which the engine's clock is excused from."""
    clock = FakeClock()
    async with running(gate_is_open=False, step_timeout=0.01, clock=clock) as (thread, runner):
        await thread.submit(specs([[1]], max_tokens=1))
        await asyncio.to_thread(runner.is_running.wait)
        waiting = asyncio.create_task(thread.submit(specs([[2]], max_tokens=1)))
        # More than one timeout of the wait is over, and none of the step.
        done, _ = await asyncio.wait([waiting], timeout=0.1)
        assert not done
        runner.gate.set()
        assert len(await collect(await waiting)) == 1


async def test_seconds_that_are_excused_count_for_the_step_in_which_they_pass() -> None:
    clock = FakeClock()
    async with running(gate_is_open=False, step_timeout=5.0, clock=clock) as (thread, runner):
        thread._thread.excuse(100.0)
        stream = await thread.submit(specs([[1]], max_tokens=1))
        await asyncio.to_thread(runner.is_running.wait)
        clock.now += 6.0
        assert thread.health.is_stalled
        thread._thread.excuse(3.0)
        assert not thread.health.is_stalled
        clock.now += 3.0
        assert thread.health.is_stalled
        runner.gate.set()
        await collect(stream)


async def test_the_counts_of_requests_are_those_of_now_while_a_step_runs() -> None:
    async with running(gate_is_open=False) as (thread, runner):
        first = await thread.submit(specs([[1]]))
        await asyncio.to_thread(runner.is_running.wait)
        waiting = asyncio.create_task(thread.submit(specs([[2], [3]])))
        await asyncio.sleep(0)
        stats = thread.latest_stats
        assert (stats.num_running, stats.num_waiting) == (0, 3)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        first.close()
        stats = thread.latest_stats
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        runner.gate.set()
        assert await is_idle(thread)


class Watcher:
    """An observer that keeps what it is notified of."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.stats: list[SchedulerStats] = []
        self.tokens: list[tuple[int, float | None]] = []
        self.ended: list[SequenceStats] = []

    def observe_step(self, step: StepRecord) -> None:
        self.steps.append(step)

    def observe_stats(self, stats: SchedulerStats) -> None:
        self.stats.append(stats)

    def observe_tokens(self, tokens: Sequence[NewTokens]) -> None:
        self.tokens += [(new.num_tokens, new.gap) for new in tokens]

    def observe_end(self, sequence: SequenceStats) -> None:
        self.ended.append(sequence)


async def test_an_observer_is_notified_of_every_step_and_every_sequence() -> None:
    async with running() as (thread, _):
        thread.observer = watcher = Watcher()
        # Two chunks of a prompt, then two tokens.
        stream = await thread.submit(specs([[1] * 20], max_tokens=2, priority=Priority.HIGH))
        await collect(stream)
        assert await is_idle(thread)
        assert [step.num_tokens for step in watcher.steps] == [16, 4, 1]
        assert [num for num, _ in watcher.tokens] == [1, 1]
        first_gap, second_gap = (gap for _, gap in watcher.tokens)
        (sequence,) = watcher.ended
        assert sequence is stream.sequences[0]
        assert sequence.finish_reason is FinishReason.LENGTH
        assert (sequence.num_prompt_tokens, sequence.num_output_tokens) == (20, 2)
        times = [
            sequence.arrival_time,
            sequence.scheduled_time,
            sequence.first_token_time,
            sequence.last_token_time,
        ]
        assert times == sorted(time for time in times if time is not None), "none is missing"
        assert sequence.end_time == sequence.last_token_time == watcher.steps[-1].ended
        assert first_gap is None
        assert second_gap == watcher.steps[-1].ended - watcher.steps[-2].ended
        # They come after what they count; pytest's time-out ends a wait for what never comes.
        while not watcher.stats or watcher.stats[-1].num_running:
            await is_idle(thread)
        assert thread.latest_stats == watcher.stats[-1]


async def test_an_observer_is_notified_of_aborted_and_failed_sequences() -> None:
    async with running(gate_is_open=False) as (thread, runner):
        thread.observer = watcher = Watcher()
        left = await thread.submit(specs([[1]]))
        await asyncio.to_thread(runner.is_running.wait)
        left.close()
        left.finish(0, FinishReason.STOP)
        (sequence,) = watcher.ended
        assert sequence.finish_reason is FinishReason.ABORT
        assert sequence.scheduled_time is sequence.first_token_time is None
        runner.gate.set()
        assert await is_idle(thread)
        runner.fail = RuntimeError("injected")
        with pytest.raises(RequestFailed):
            await collect(await thread.submit(specs([[1]])))
        assert [sequence.finish_reason for sequence in watcher.ended] == [
            FinishReason.ABORT,
            FinishReason.ERROR,
        ]
        assert watcher.steps[-1].has_failed


async def test_an_observer_that_raises_costs_no_stream_a_token(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Watcher):
        def observe_step(self, step: StepRecord) -> None:
            raise ZeroDivisionError

    async with running() as (thread, _):
        watcher = Watcher()
        thread.observer = Observers(Broken(), watcher)
        output = await collect(await thread.submit(specs([[1]], max_tokens=3)))
        assert output == expected_output([1], 3)
        assert await is_idle(thread)
        assert len(watcher.steps) == 3
    assert "an observer of the engine failed" in caplog.text


async def test_if_the_engine_dies_every_stream_and_call_fails() -> None:
    async with running(gate_is_open=False) as (thread, runner):
        streams = [await thread.submit(specs([[1]]))]
        await asyncio.to_thread(runner.is_running.wait)
        # These wait in the inbox while the engine is inside its last step.
        late = [asyncio.create_task(thread.submit(specs([[i]]))) for i in range(3)]
        abandoned = asyncio.create_task(thread.stats())
        await asyncio.sleep(0)
        abandoned.cancel()
        await asyncio.sleep(0)
        runner.fail = runner.fail_reset = RuntimeError("injected")
        runner.gate.set()
        for stream in streams:
            with pytest.raises(EngineStopped, match="the engine has stopped"):
                await collect(stream)
        for result in await asyncio.gather(*late, return_exceptions=True):
            assert type(result) is EngineStopped
        assert not thread.is_alive
        with pytest.raises(EngineStopped):
            await thread.submit(specs([[1]]))
        streams[0].close()


async def test_stopping_ends_open_streams() -> None:
    async with running(gate_is_open=False) as (thread, runner):
        stream = await thread.submit(specs([[1]]))
        await asyncio.to_thread(runner.is_running.wait)
        for _ in range(2):
            thread.stop(timeout=0)
        runner.gate.set()
        await anext(stream)
        with pytest.raises(EngineClosed):
            await anext(stream)
        await asyncio.to_thread(thread.stop)
        with pytest.raises(EngineClosed):
            await thread.submit(specs([[1]]))
        assert not thread.is_alive


async def test_a_stream_closed_while_its_last_token_is_delivered_gets_nothing() -> None:
    """Tokens of a step may be on their way to the loop while the client leaves."""
    async with running(gate_is_open=False) as (thread, runner):
        stream = await thread.submit(specs([[1]], max_tokens=1))
        await asyncio.to_thread(runner.is_running.wait)
        runner.gate.set()
        stream.close()
        assert await is_idle(thread)


async def test_a_call_that_raises_does_so_in_its_caller() -> None:
    async with running() as (thread, _):
        with pytest.raises(ZeroDivisionError):
            await thread.call(lambda _: 1 // 0)
        assert thread.is_alive


def test_a_model_that_cannot_be_loaded_raises_in_start() -> None:
    def build(slices: LoadSlices) -> LoadedEngine:
        raise ModelLoadError("no such file")

    thread = AsyncEngine(build)
    with pytest.raises(ModelLoadError, match="no such file"):
        thread.start()
    assert not thread.is_alive


def test_a_closed_event_loop_gets_nothing() -> None:
    """A benchmark may end its loop while the engine is in a step."""
    runners: list[GatedRunner] = []
    thread = AsyncEngine(lambda _: load(runners.append))
    thread.start()

    async def submit() -> None:
        await thread.submit(specs([[1]], max_tokens=1))
        await asyncio.to_thread(runners[0].is_running.wait)

    asyncio.run(submit())
    runners[0].gate.set()
    thread.stop()
    assert not thread.is_alive


async def test_the_time_since_a_step_counts_from_the_start() -> None:
    clock = FakeClock(5.0)
    async with running(clock=clock) as (thread, _):
        clock.now = 8.0
        assert thread.health.seconds_since_step == 3.0


def test_stopping_what_was_never_started_does_not_wait() -> None:
    AsyncEngine(lambda _: load()).stop()
