"""Routes the outputs of the engine to the streams of their callers, on the event loop."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from batching.engine.streams.token_stream import TokenStream
from batching.errors import EngineError
from batching.scheduling.outputs import RequestFailure, RequestOutput
from batching.steps.observer import EngineObserver, NewTokens, Observers, SequenceStats, StepRecord
from batching.steps.stats import SchedulerStats
from batching.steps.token_output import FinishReason, TokenOutput

# Also where a layer above ends it, as at a stop string.
_COMPLETE: Final = (FinishReason.STOP, FinishReason.LENGTH)


class AdaptersInUse(NamedTuple):
    """The names of the adapters of requests that run, and of requests that wait."""

    running: frozenset[str]
    waiting: frozenset[str]


NOT_IN_USE: Final = AdaptersInUse(frozenset(), frozenset())


@dataclass(frozen=True, slots=True)
class StreamHandle:
    """One sequence of a stream, which gets the outputs of one request in the engine."""

    stream: TokenStream
    index: int

    @property
    def sequence(self) -> SequenceStats:
        return self.stream.sequences[self.index]

    def put(self, item: TokenOutput | EngineError) -> None:
        self.stream.put(self.index, item)


class StreamRouter:
    """Delivers the outputs of a step to their streams, and reports them to the observer.

    Only the event loop touches it, except for `call_in_loop`, which any thread may call.

    observer: called for every step and for every sequence.
    latest_stats: the statistics after the last step, or when the engine last became idle.
    last_step_ended: in seconds on the engine's clock.
    num_failed_steps: failed steps since a sequence was last completed.
    """

    latest_stats: SchedulerStats

    def __init__(self, now: float) -> None:
        self.observer: EngineObserver = Observers()
        self.last_step_ended = now
        self.num_failed_steps = 0
        self._handles: dict[int, StreamHandle] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the event loop that receives outputs; it may change only while no stream is open."""
        assert not self._handles or self._loop is loop, "one event loop at a time"
        self._loop = loop

    def call_in_loop(self, func: Callable[..., object], *args: object) -> None:
        """Have the event loop call `func`; does nothing if no loop is bound, or it is closed."""
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(func, *args)

    def open(self, stream: TokenStream, request_ids: Sequence[int]) -> None:
        """Route the outputs of these requests to a stream; request i is sequence i of the stream."""
        self._handles |= {i: StreamHandle(stream, index) for index, i in enumerate(request_ids)}

    def end(self, request_id: int, reason: FinishReason, now: float) -> bool:
        """End the sequence of a request and stop routing to it; return False if it had ended before."""
        if (handle := self._handles.pop(request_id, None)) is None:
            return False
        if reason in _COMPLETE:
            self.num_failed_steps = 0
        handle.sequence.finish_reason, handle.sequence.end_time = reason, now
        self.observer.observe_end(handle.sequence)
        return True

    def fail_all(self, error: EngineError, now: float) -> list[int]:
        """End all open sequences with an error; return the ids of their requests."""
        request_ids = list(self._handles)
        for request_id in request_ids:
            self._handles[request_id].put(error)
            self.end(request_id, FinishReason.ERROR, now)
        return request_ids

    def deliver(self, items: Sequence[RequestOutput | RequestFailure], step: StepRecord) -> None:
        """Put the outputs of one step into their streams and report them to the observer."""
        self.num_failed_steps += step.has_failed
        self.last_step_ended, self.latest_stats = step.ended, step.stats
        if step.is_idle:
            # What is stored meanwhile is no time of requests.
            self.observer.observe_stats(step.stats)
        else:
            self.observer.observe_step(step)
        self._record(items, step.ended)
        for item in items:
            if (handle := self._handles.get(item.request_id)) is None:
                continue
            if isinstance(item, RequestFailure):
                handle.put(item.error)
                self.end(item.request_id, FinishReason.ERROR, step.ended)
            else:
                handle.put(item.output)
                if item.output.finish_reason is not None:
                    self.end(item.request_id, item.output.finish_reason, step.ended)

    def current_stats(self) -> SchedulerStats:
        """Return the latest statistics, their counts of requests corrected by what the step did not see.

        The scheduler sees between two steps only which requests have arrived and whose clients have left.
        """
        stats, num_open = self.latest_stats, len(self._handles)
        num_running = min(stats.num_running, num_open)
        num_waiting = num_open - num_running
        return stats._replace(
            num_running=num_running,
            num_waiting=num_waiting,
            num_prefilling=min(stats.num_prefilling, num_running),
            num_awaiting_prefix=min(stats.num_awaiting_prefix, num_waiting),
        )

    def adapters(self) -> AdaptersInUse:
        """Return the adapters of the open requests; those run of which an output has come."""
        running, waiting = set[str](), set[str]()
        for handle in self._handles.values():
            if (name := handle.sequence.adapter) is not None:
                (waiting if handle.sequence.scheduled_time is None else running).add(name)
        return AdaptersInUse(frozenset(running), frozenset(waiting))

    def deliver_stats(self, stats: SchedulerStats) -> None:
        self.latest_stats = stats
        self.observer.observe_stats(stats)

    def _record(self, items: Sequence[RequestOutput | RequestFailure], now: float) -> None:
        tokens: list[NewTokens] = []
        for item in items:
            handle = self._handles.get(item.request_id)
            if handle is None or isinstance(item, RequestFailure):
                continue
            gap = handle.sequence.record(item.output, now)
            if not item.output.is_progress:
                tokens.append(NewTokens(handle.sequence, len(item.output.token_ids), gap))
        if tokens:
            self.observer.observe_tokens(tokens)
