"""The engine: plans a step, runs it on the model, and records its outputs."""

import logging
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, Final, NamedTuple

from batching.config import DEFAULT_MAX_STALL_MS
from batching.errors import RequestFailed
from batching.kv_cache.cache_events import CacheEventSink
from batching.request import BatchRequest
from batching.scheduler import ContinuousBatchingScheduler, StoreLimits
from batching.scheduling.engine_turns import ALONE, Demand, Turn
from batching.scheduling.outputs import RequestFailure, RequestOutput
from batching.scheduling.snapshot import EngineSnapshot
from batching.scheduling.stall_budget import MIN_CHUNK, StallBudget
from batching.steps.model_runner import ModelRunner, PipelinedRunner, QueuedStep, SlicesFailed
from batching.steps.observer import StepRecord
from batching.steps.stats import SchedulerStats
from batching.steps.step_plan import SliceOutput, StepPlan

logger = logging.getLogger(__name__)

# After so many seconds requests are looked after that wait for the store: a disk may never answer.
LOOK_INTERVAL: Final = 1.0


class _Step(NamedTuple):
    """A planned step, with the computation that yields its outputs.

    planned: when it was planned, in seconds on the engine's clock.
    """

    plan: StepPlan
    queued: QueuedStep
    planned: float


class _RunWhenCollected(NamedTuple):
    """A step of a runner without a queue: it is computed when its outputs are collected."""

    runner: ModelRunner
    plan: StepPlan

    def collect(self) -> Sequence[SliceOutput]:
        return self.runner.run(self.plan)


class _NotQueued:
    """A step that raised when it was queued; the error is raised when its outputs are collected."""

    def __init__(self, error: Exception) -> None:
        self._errors = [error]

    def collect(self) -> Sequence[SliceOutput]:
        # Nothing keeps it, or its traceback would keep what is in its frames.
        raise self._errors.pop()


class BatchInferenceEngine:
    """Serves requests in steps.  It is not thread-safe: its owner calls it from one thread.

    `add` requests, then call `step` while `has_work`; each call returns the new outputs.

    With a pipelined runner, the next step is queued before the outputs of the current one are read,
    wherever the scheduler can plan it, so that the device does not wait for Python.  Between two calls of
    `step` one step may then be in flight.  If a request ends meanwhile, its rows in that step are
    computed in vain and dropped.

    last_step: the record of the latest step.
    """

    last_step: StepRecord

    def __init__(
        self,
        scheduler: ContinuousBatchingScheduler,
        runner: ModelRunner,
        *,
        max_stall: float = DEFAULT_MAX_STALL_MS / 1000,
        min_chunk: int = MIN_CHUNK,
        clock: Callable[[], float] = monotonic,
        pipeline: PipelinedRunner[Any] | None = None,
    ) -> None:
        """Make an engine without requests.

        max_stall: the most seconds that prefill or an image may add to a step of running requests.
        min_chunk: prompt tokens that a step may always process; see `StallBudget`.
        clock: in seconds; the arrival times of requests are on the same clock.
        pipeline: the same object as `runner` if steps are to be queued; None runs one step at a time.
        """
        self._scheduler = scheduler
        self._runner = runner
        max_alone = scheduler.config.max_urgent_wait
        self._stall_budget = StallBudget(max_stall, min_chunk, max_alone)
        self._clock = clock
        self._pipeline = pipeline
        self._in_flight: _Step | None = None
        self._last_ended = 0.0
        self._requests: dict[int, BatchRequest] = {}
        # When requests that wait for the store are looked after in any case; 0 if none do.
        self._next_look = 0.0
        self._cache_event_sink: CacheEventSink | None = None

    @property
    def has_work(self) -> bool:
        """True if there are requests."""
        return self._scheduler.has_work or self._in_flight is not None

    @property
    def can_step(self) -> bool:
        """True if a step would do something: requests may wait for the store, and blocks to be stored without any."""
        if self._in_flight is not None or self._scheduler.can_save:
            return True
        return self._scheduler.has_work and self._clock() >= self._next_look

    @property
    def will_step(self) -> bool:
        """True if there is a step to run, now or later: the store may be at work, for `LOOK_INTERVAL` at most."""
        return self.has_work or self._scheduler.has_unsaved

    def report_cache(self, sink: CacheEventSink) -> None:
        """Call `sink` at the end of each step in which blocks that requests share came or went."""
        self._scheduler.record_cache_events()
        self._cache_event_sink = sink

    def go_on(self) -> None:
        """Record that something was read from the store."""
        self._next_look = 0.0

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def snapshot(self) -> EngineSnapshot:
        """Return a picture of the queue, the requests and the pool, and how long taking it took."""
        began = self._clock()
        return self._scheduler.snapshot(began).took(self._clock() - began)

    def add(self, *requests: BatchRequest) -> None:
        """Queue requests that `check_request` has accepted; forks come together with their request."""
        self._next_look = 0.0
        for request in requests:
            self._requests[request.request_id] = request
            if request.fork_of is None:
                self._scheduler.add(request)

    def abort(self, request_id: int) -> None:
        """End a request before the next step; does nothing if it has ended."""
        self._next_look = 0.0
        if (request := self._requests.pop(request_id, None)) is not None:
            self._scheduler.abort(request)

    def demand(self, now: float) -> Demand:
        """Return what there is to do, for a choice among engines; `now` is on the engine's clock."""
        demand = self._scheduler.demand(now)
        return demand._replace(is_in_flight=self._in_flight is not None)

    def step(self, turn: Turn = ALONE) -> list[RequestOutput | RequestFailure]:
        """Run one step; return an output or a failure for each request that it advanced.

        turn: what other engines that use the device leave to this one.

        If the step raises, its requests fail and the contents of the pool are lost; all other admitted
        requests start over from their tokens.

        Raises:
            Exception: the pool cannot be made usable again; the engine is then of no further use.
        """
        step = self._in_flight or self._plan(turn)
        self._in_flight = self._follow(step) if turn.is_alone else None
        plan = step.plan
        # A step in flight begins when the one before has ended.
        began = max(step.planned, self._last_ended)
        has_failed = False
        try:
            outputs = self._collect(step, began)
        except SlicesFailed as failure:
            logger.exception("%d requests of a step failed", len(failure.request_ids))
            outputs = self._recover(plan, failure.request_ids, RequestFailed(*failure.reasons))
        except Exception:
            logger.exception("a step of %d requests failed", len(plan.slices))
            has_failed = True
            outputs = self._recover(plan)
        self._forget_ended(outputs)
        ended = self._last_ended = self._clock()
        self.last_step = StepRecord(
            ended,
            ended - began,
            plan.num_tokens,
            plan.num_prompt_tokens,
            self.stats(),
            has_failed,
            self._scheduler.block_manager.take_ages(),
            is_idle=not (plan.slices or plan.encodes or plan.restores or plan.adapters),
        )
        if self._cache_event_sink is not None and (events := self._scheduler.take_cache_events()):
            self._cache_event_sink(events)
        return outputs

    def drain(self) -> None:
        """Wait for the step in flight, if there is one, and drop its outputs.

        Its requests must be ended or restarted afterwards.
        """
        if self._in_flight is not None:
            with suppress(Exception):
                self._in_flight.queued.collect()
            self._in_flight = None

    def save_rest(self, seconds: float) -> None:
        """Hand over what is left to be stored, for some seconds at most; no step may be run afterwards."""
        until = self._clock() + seconds
        try:
            while self._scheduler.can_save and self._clock() < until:
                self._runner.run(self._scheduler.plan_saves())
        except Exception:
            logger.exception("not all keys and values are stored")

    def _plan(self, turn: Turn = ALONE, after: QueuedStep | None = None) -> _Step:
        planned = self._clock()
        plan = self._scheduler.schedule(
            self._max_prefill_tokens(planned, turn),
            self._max_image_bytes(planned, turn),
            self._store_limits(turn, may_save=after is None),
            now=planned,
        )
        self._next_look = planned + LOOK_INTERVAL if plan.is_empty else 0.0
        logger.debug("step %s", plan)
        return _Step(plan, self._queue(plan, after), planned)

    def _queue(self, plan: StepPlan, after: QueuedStep | None) -> QueuedStep:
        if self._pipeline is None:
            return _RunWhenCollected(self._runner, plan)
        try:
            queued: QueuedStep = self._pipeline.submit(plan, after)
        except Exception as error:
            # It fails in its turn: the step before is in flight.
            return _NotQueued(error)
        return queued

    def _follow(self, step: _Step) -> _Step | None:
        """Plan and queue the step after `step`; None if that has to wait for the outputs of `step`."""
        if self._pipeline is None or isinstance(step.queued, _NotQueued):
            return None
        if not self._scheduler.can_expect(step.plan, self._pipeline.can_follow):
            return None
        self._scheduler.expect(step.plan)
        return self._plan(after=step.queued)

    def _max_prefill_tokens(self, now: float, turn: Turn) -> int | None:
        if not turn.may_prefill:
            return 0
        if self._scheduler.expects_others(now, turn):
            return self._stall_budget.max_interruptible_tokens()
        return self._stall_budget.max_prefill_tokens(
            *self._scheduler.num_prompts_and_streams(), has_other_streams=turn.has_other_streams
        )

    def _max_image_bytes(self, now: float, turn: Turn) -> float:
        _, num_streams = self._scheduler.num_prompts_and_streams()
        may_stall = turn.has_other_streams or self._scheduler.expects_others(now, turn)
        return self._stall_budget.max_image_bytes(has_streams=num_streams > 0 or may_stall)

    def _store_limits(self, turn: Turn, *, may_save: bool) -> StoreLimits:
        _, num_streams = self._scheduler.num_prompts_and_streams()
        has_streams = num_streams > 0 or turn.has_other_streams
        seconds = self._stall_budget.max_seconds(has_streams=has_streams)
        return StoreLimits(seconds, may_save, self._stall_budget.seconds_per_token)

    def _collect(self, step: _Step, began: float) -> list[RequestOutput | RequestFailure]:
        outputs = step.queued.collect()
        duration = self._clock() - began
        num_decoded = step.plan.num_decode_tokens
        num_prefilled = step.plan.num_tokens - num_decoded
        if encodes := step.plan.encodes:
            num_bytes = sum(order.num_bytes for order in encodes)
            self._stall_budget.record_images(num_bytes, num_prefilled, num_decoded, duration)
        elif step.plan.slices and not (step.plan.restores or step.plan.adapters):
            self._stall_budget.record(num_prefilled, num_decoded, duration)
        return self._scheduler.update(step.plan, outputs)

    def _recover(
        self,
        plan: StepPlan,
        failed_ids: Container[int] | None = None,
        error: RequestFailed | None = None,
    ) -> list[RequestOutput | RequestFailure]:
        """Restore the engine after a step that raised; return a failure for each request at fault."""
        # A step in flight has used the results of this one.
        self.drain()
        self._scheduler.discard(plan, failed_ids)
        self._runner.reset()
        # A request may also have ended in this step before it raised: its output was not returned.
        ended = [r for r in self._requests.values() if r.has_ended]
        return [RequestFailure(r.request_id, error or RequestFailed()) for r in ended]

    def _forget_ended(self, outputs: list[RequestOutput | RequestFailure]) -> None:
        for item in outputs:
            if isinstance(item, RequestFailure) or item.output.finish_reason is not None:
                del self._requests[item.request_id]
