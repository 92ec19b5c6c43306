"""The scheduler: decides before each step which tokens of which requests the model processes."""

from collections.abc import Callable, Container, Sequence
from math import inf
from typing import Final, NamedTuple

from batching.admission.admission_queue import AdmissionQueue
from batching.config import SchedulerConfig
from batching.inputs.images import Span, Spans
from batching.inputs.sampling_params import SamplingParams
from batching.kv_cache.cache_events import CacheEvent, CacheEventLog
from batching.kv_cache.manager import KVCacheManager
from batching.kv_cache.stored_blocks import StoredBlocks
from batching.request import BatchRequest, RequestStatus
from batching.scheduling.best_effort import BestEffortTurns
from batching.scheduling.engine_turns import ALONE, Demand, Turn
from batching.scheduling.image_encoding import ImageEncoding
from batching.scheduling.lookahead import goes_on, is_predictable
from batching.scheduling.outputs import RequestFailure, RequestOutput
from batching.scheduling.residents import Residents
from batching.scheduling.running import RunningRequests
from batching.scheduling.snapshot import EngineSnapshot, take_snapshot
from batching.scheduling.step_planner import StepPlanner, max_decode_rows
from batching.scheduling.step_recorder import StepRecorder
from batching.steps.stats import SchedulerStats
from batching.steps.step_plan import RestoreOrder, SaveOrder, Slice, SliceOutput, StepPlan


class StoreLimits(NamedTuple):
    """What a step may do with the store.

    max_restore_seconds: that restoring may take, so that streams wait no longer than they may; one block is always
        possible.
    may_save: no step is in flight, which might write what is stored.
    seconds_per_token: what computing a prompt takes, to compare with reading; 0 is not known.
    """

    max_restore_seconds: float = inf
    may_save: bool = True
    seconds_per_token: float = 0.0


UNLIMITED: Final = StoreLimits()


class ContinuousBatchingScheduler:
    """Iteration-level scheduling (Orca, Yu et al. 2022) over a paged KV cache.

    It is pure: no threads, no clock, no tensors.  The engine calls `schedule()` to get the plan of a
    step, runs the plan on the model, and passes the sampled tokens to `update()`.  Requests are added and
    aborted between two steps.

    Order within a plan: first the requests that decode, one token each plus their drafts; then chunks of
    prompts within the token budget.  Waiting requests are admitted in the order of the aging queue, as
    long as there is a sequence slot and room for the whole prompt; none overtakes a request that has to
    wait for room.  Where a request would wait too long, lower classes make way for it: `Urgency` says
    which, and how long each class waits at most.  When blocks run out, the last admitted request is
    preempted: of the lowest class, the one that is due last.  Best-effort requests run when no other request has work; otherwise they take part in
    a step twice a second, and their own steps stay short for a while after other requests.

    Asynchronous scheduling: while a step runs, the next one can be planned.  `expect()` records the step
    in flight as if it had been run, with a placeholder for each token that it samples; `schedule()` may
    then be called before `update()`.  If a request ends meanwhile, what the next step computes for it is
    dropped; its blocks are free immediately, because the device runs steps in order.

    Invariants, checked by tests/batching/test_scheduler.py:

    - the output of a request depends only on the request
    - a request that is neither prefilling nor running holds no block
    - a plan never has more than `max_num_batched_tokens` tokens

    Ownership: `KVCacheManager` owns the blocks, `AdmissionQueue` the waiting requests, `RunningRequests`
    the admitted ones, and `Residents` knows which of them the executor knows.  A `StepPlanner` makes one
    plan; `StepRecorder` records what the step has computed.
    """

    def __init__(self, config: SchedulerConfig, stored: StoredBlocks | None = None) -> None:
        """`stored` is the store of blocks that outlives the pool; None is none."""
        self.config = config
        self._kv = KVCacheManager(config, stored)
        self.block_manager = self._kv.block_manager
        self._admission = AdmissionQueue(config, self._kv)
        self._waiting = self._admission.waiting
        self._residents = Residents()
        self._running = RunningRequests(self._kv, self._admission, self._residents)
        self._recorder = StepRecorder(config, self._kv, self._running, self._residents)
        self._turns = BestEffortTurns()
        self._images = ImageEncoding(config)

    @property
    def has_work(self) -> bool:
        return bool(self._running.requests or self._waiting)

    @property
    def has_unsaved(self) -> bool:
        """True if blocks or states are left to be stored."""
        return self._kv.store is not None and self._kv.store.num_unsaved > 0

    @property
    def can_save(self) -> bool:
        """True if some of that can be stored now."""
        return self._kv.store is not None and self._kv.store.can_save

    def plan_saves(self) -> StepPlan:
        """Return a step that stores some of what is left, each once, and does nothing else but the copies that are due."""
        return self._plan_of((), ())

    def record_cache_events(self) -> None:
        """Record from now on what becomes of shared blocks, for `take_cache_events`."""
        self._kv.events = CacheEventLog(self.block_manager)

    def take_cache_events(self) -> Sequence[CacheEvent]:
        """Return what became of shared blocks since the last call."""
        return () if self._kv.events is None else self._kv.events.take()

    def stats(self) -> SchedulerStats:
        blocks, prefix_cache = self.block_manager, self._kv.prefix_cache
        running, spec_decode = self._running.requests, self._recorder.spec_decode
        stats = SchedulerStats(
            num_waiting=len(self._waiting),
            num_running=len(running),
            num_prefilling=sum(r.status is RequestStatus.PREFILLING for r in running),
            num_awaiting_prefix=self._admission.num_awaiting_prefix,
            block_size=self.config.block_size,
            num_blocks=blocks.num_blocks,
            num_free_blocks=blocks.num_free_blocks,
            num_cached_blocks=blocks.num_cached_blocks,
            num_preemptions=self._running.num_preemptions,
            num_urgent_preemptions=self._running.num_urgent_preemptions,
            num_evictions=blocks.num_evictions,
            num_queried_tokens=prefix_cache.num_queried_tokens,
            num_hit_tokens=prefix_cache.num_hit_tokens,
            num_aged_admissions=self._admission.num_aged_admissions,
            num_prefix_waits=self._admission.num_prefix_waits,
            num_drafts=spec_decode.num_drafts,
            num_draft_tokens=spec_decode.num_tokens,
            num_accepted_tokens=spec_decode.num_accepted,
            num_images_encoded=self._images.num_encoded,
        )
        return self._kv.add_to(stats)

    def num_prompts_and_streams(self) -> tuple[int, int]:
        """Return how many prompts are being prefilled or could be admitted, and how many requests decode.

        Best-effort requests count only if there are no others, since they pause beside others.
        """
        running, num_waiting = self._running.requests, len(self._waiting)
        others, num_others = self._running.split()[0], self._admission.num_others
        if others or num_others:
            running, num_waiting = others, num_others
        num_streams = sum(r.status is RequestStatus.RUNNING for r in running)
        num_admissible = min(num_waiting, self.config.max_num_seqs - len(running))
        return len(running) - num_streams + num_admissible, num_streams

    def expects_others(self, now: float, turn: Turn = ALONE) -> bool:
        """Return whether only best-effort requests are here and an interactive one may arrive soon."""
        running = self._running.requests
        # Best-effort requests are behind all others.
        has_others = self._admission.is_awaited or bool(running and not running[0].is_best_effort)
        return not has_others and (turn.expects_others or self._turns.expects_others(now))

    def snapshot(self, now: float) -> EngineSnapshot:
        """Return a picture of the queue, the requests and the pool; `now` is on the engine's clock."""
        return take_snapshot(
            self.stats(),
            self.config.max_num_seqs,
            self._running.requests,
            self._waiting,
            self.block_manager,
            now,
        )

    def add(self, request: BatchRequest) -> None:
        """Queue a request together with its forks; `check_request` has accepted it."""
        num_tokens = request.num_prompt_tokens + request.spec.output_limit
        assert num_tokens <= self.config.max_request_tokens, "the request could not run alone"
        if self.config.reads_whole:
            request.spans = Spans([Span(0, request.num_prompt_tokens)])
        self._admission.push(request)

    def abort(self, request: BatchRequest) -> None:
        """End a request in any state and free its blocks; does nothing if it has ended.

        If other choices wait for this request's prefill, the first of them takes it over.
        """
        if request.status is RequestStatus.WAITING:
            if request.fork_of is None:
                self._admission.remove(request)
            else:
                request.fork_of.forks.remove(request)
            request.move_to(RequestStatus.CANCELLED)
            self._residents.end(request)
        elif request.status in (RequestStatus.PREFILLING, RequestStatus.RUNNING):
            self._running.leave(request, RequestStatus.CANCELLED)
        request.forget_expected()
        if request.forks:
            self._promote_fork(request)

    def demand(self, now: float) -> Demand:
        """Return what there is to do, for a choice among engines; `now` is on the engine's clock."""
        running, best_effort = self._running.split()
        prompts = [r for r in running if r.status is RequestStatus.PREFILLING]
        num_streams = len(running) - len(prompts)
        prompts += self._admission.startable(self._running.requests, now)
        return Demand(
            num_streams,
            min((r.rank for r in prompts), default=inf),
            min((self._waiting.key(r).due_time for r in prompts), default=inf),
            min((r.num_pending_tokens for r in prompts), default=inf),
            has_best_effort=bool(best_effort) or self._admission.num_best_effort > 0,
            is_best_effort_due=self._turns.is_due(now),
        )

    def schedule(
        self,
        max_prefill_tokens: int | None = None,
        max_image_bytes: float = inf,
        store: StoreLimits = UNLIMITED,
        *,
        now: float = 0.0,
    ) -> StepPlan:
        """Plan the next step; admit and preempt requests as needed.

        max_prefill_tokens: the most prompt tokens that the step may process, so that the inter-token
            latency of running requests stays low, and no request that arrives meanwhile waits for long;
            None is no limit.
        max_image_bytes: of an image, for the same reason; a piece of it is always possible.
        store: what is read from the store, and written to it.
        now: when the step begins, in seconds on the engine's clock.
        """
        self._kv.pass_time(now, store.seconds_per_token)
        step = StepPlanner(
            self.config,
            self._kv,
            self._running,
            self._residents,
            self._images,
            max_prefill_tokens,
            store.max_restore_seconds,
            may_end=self._recorder.expects_step,
        )
        others, best_effort = self._running.split()
        if others or self._admission.is_awaited:
            self._turns.serve_others(now)
        is_due = self._turns.is_due(now)
        num_reserved = len(best_effort) if is_due else 0
        # This comes before the admission of others, which would take the room, so that one in flight would be preempted.
        has_decodes = step.make_room(others)
        if (num_reserved or not has_decodes) and not self._admission.is_awaited:
            step.make_room(best_effort)
        if not step.has_preempted:
            # A preempted request is first in the queue; it must not come back before the
            # room that it made is used.
            self._admit(now, is_best_effort_due=is_due)
        # There are fewer best-effort requests now if some made way.
        num_reserved = min(num_reserved, self._running.num_best_effort)
        self._images.begin(self._running.requests, max_image_bytes)
        step.add_decodes(others, num_reserved)
        step.add_prefills(is_best_effort=False, num_reserved=num_reserved)
        self._add_best_effort(step, best_effort, now, is_due=is_due)
        return self._plan_of(step.slices, step.restores, may_save=store.may_save)

    def _add_best_effort(
        self, step: StepPlanner, decodes: Sequence[BatchRequest], now: float, *, is_due: bool
    ) -> None:
        """Add slices of best-effort requests if it is their turn, or the step has no other work."""
        has_work = bool(step.slices) or self._images.has_order
        if self._running.has_best_effort and (is_due or not has_work):
            step.add_decodes(decodes)
            step.add_prefills(is_best_effort=True)
            self._turns.serve(now)

    def update(
        self, plan: StepPlan, outputs: Sequence[SliceOutput]
    ) -> list[RequestOutput | RequestFailure]:
        """Record what a step computed; return an output for each request that advanced.

        outputs: one for each slice, in the order of the plan.
        """
        return self._recorder.record(plan, outputs)

    def can_expect(self, plan: StepPlan, can_follow: Callable[[SamplingParams], bool]) -> bool:
        """Return whether the next step can be planned before the outputs of `plan` are known.

        That is not possible if the next step might contain drafts, preempt a request, stop one for a more
        urgent one, store what a step has written, or be empty.

        can_follow: whether the executor samples for such parameters before the token before is known.
        """
        current = [
            (s, request)
            for s in plan.slices
            if (request := self._residents.get(s.sequence_id)) is not None
        ]
        # Best-effort requests do not hinder drafts that begin a step without them.
        running = self._running.requests
        decoding = [r for r in running if r.status is RequestStatus.RUNNING]
        num_decoding = sum(not r.is_best_effort for r in decoding) or len(decoding)
        may_draft = (
            self.config.max_draft_tokens > 0 and max_decode_rows(self.config, num_decoding) > 1
        )
        return (
            any(goes_on(s, request) for s, request in current)
            and not self._may_make_way()
            and not (self._kv.store is not None and self._kv.store.is_due)
            and self._kv.has_room_to_grow(running)
            and all(is_predictable(s, request, may_draft=may_draft) for s, request in current)
            and all(can_follow(r.spec.sampling) for s, r in current if s.num_samples)
        )

    def expect(self, plan: StepPlan) -> None:
        """Record a step in flight as far as it is known, with placeholders for the tokens that it samples.

        The caller has checked `can_expect`.
        """
        self._recorder.expect(plan)

    def discard(self, plan: StepPlan, failed_ids: Container[int] | None = None) -> None:
        """Drop a step that raised: cancel the requests at fault and restart all other admitted requests.

        The contents of the pool are lost, so the others are preempted and start over from their tokens, and
        the prefix cache is empty.

        failed_ids: the ids of the requests to cancel; None cancels every request of the step.
        """
        self._recorder.forget_expected()
        self._cancel_encoding(plan, failed_ids)
        if self._kv.states is not None:
            self._kv.states.forget()
        for s in plan.slices:
            known = [self._residents.get(each) for each in (s.sequence_id, *s.forks)]
            first = known[0]
            forks = [] if first is None else first.forks
            requests = dict.fromkeys(r for r in (*known, *forks) if r is not None)
            if failed_ids is None or any(r.request_id in failed_ids for r in requests):
                # The last one first, so that no fork is left to prefill the prompt by itself.
                for request in reversed(requests):
                    self.abort(request)
        for request in list(self._running.requests):
            self._running.preempt(request)
        self._kv.forget_cached()
        self._images.forget()
        self._residents.forget()

    def _cancel_encoding(self, plan: StepPlan, failed_ids: Container[int] | None) -> None:
        """Cancel requests whose images a step could not encode; they may have no slice in it."""
        ids = {
            o.sequence_id for o in plan.encodes if failed_ids is None or o.sequence_id in failed_ids
        }
        for request in [r for r in self._running.requests if r.request_id in ids]:
            self.abort(request)

    def _may_make_way(self) -> bool:
        """Return whether a running request might be stopped for a waiting one of a higher class."""
        # The last one is of the lowest class.
        lowest = self._running.requests[-1]
        may_stop = lowest.is_best_effort or self.config.max_urgent_wait_ms is not None
        return may_stop and any(r.rank < lowest.rank for r in self._waiting)

    def _admit(self, now: float, *, is_best_effort_due: bool) -> None:
        started = self._admission.admit(
            self._running.requests,
            now,
            self._running.make_way,
            is_best_effort_due=is_best_effort_due,
        )
        for request in started:
            self._running.join(request)

    def _plan_of(
        self, slices: Sequence[Slice], restores: Sequence[RestoreOrder], *, may_save: bool = True
    ) -> StepPlan:
        changes = self._residents.take_changes()
        saves: Sequence[SaveOrder] = ()
        if self._kv.store is not None and may_save:
            is_busy = bool(slices) or self._images.has_order
            saves = self._kv.store.take_saves(is_busy=is_busy)
        return StepPlan(
            tuple(slices),
            self._kv.take_copies(),
            changes.preempted,
            () if self._kv.states is None else self._kv.states.take_copies(),
            changes.started,
            changes.ended,
            *self._images.take(),
            saves=tuple(saves),
            restores=tuple(restores),
            adapters=self._kv.adapters.take_loads(),
        )

    def _promote_fork(self, request: BatchRequest) -> None:
        """Let the first fork of a request that was aborted prefill the prompt in its place."""
        first, *others = request.forks
        for fork in request.forks:
            # A step in flight may have sampled for it in vain.
            self._residents.end(fork)
        request.forks = []
        first.fork_of = None
        first.forks = others
        for fork in others:
            fork.fork_of = first
        self._admission.push(first)
