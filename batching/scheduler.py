"""The scheduler: decides before each step which tokens of which requests the model processes."""

from bisect import bisect_left, insort
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field

from batching.config import SchedulerConfig
from batching.errors import RequestFailed
from batching.inputs.sampling_params import SamplingParams
from batching.kv_cache.manager import KVCacheManager
from batching.pooling import Vector
from batching.request import BatchRequest, RequestStatus
from batching.scheduling.admission import AdmissionQueue
from batching.scheduling.best_effort import BestEffortTurns
from batching.scheduling.lookahead import goes_on, is_predictable
from batching.scheduling.outputs import (
    RequestFailure,
    RequestOutput,
    append_sampled,
    embedding_output,
    progress_outputs,
    token_output,
)
from batching.scheduling.prefill_budget import share_prefill_budget
from batching.scheduling.residents import Residents
from batching.scheduling.snapshot import EngineSnapshot, take_snapshot
from batching.steps.stats import SchedulerStats, SpecDecodeStats
from batching.steps.step_plan import Slice, SliceOutput, StepPlan
from batching.steps.token_output import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class _Planning:
    """The state of one call of `schedule`.

    now: when the step begins, in seconds on the engine's clock.
    max_prefill_tokens: see `ContinuousBatchingScheduler.schedule`.
    preempted: requests that lost their blocks to others in this step.
    """

    now: float
    max_prefill_tokens: int | None
    preempted: list[BatchRequest] = field(default_factory=list)

    def bounded(self, budget: int, num_prefilled: int = 0) -> int:
        """Return a budget of prompt tokens, reduced to what `max_prefill_tokens` leaves.

        num_prefilled: prompt tokens that the step already has.
        """
        if self.max_prefill_tokens is None:
            return budget
        return min(budget, max(0, self.max_prefill_tokens - num_prefilled))


class ContinuousBatchingScheduler:
    """Iteration-level scheduling (Orca, Yu et al. 2022) over a paged KV cache.

    It is pure: no threads, no clock, no tensors.  The engine calls `schedule()` to get the plan of a
    step, runs the plan on the model, and passes the sampled tokens to `update()`.  Requests are added and
    aborted between two steps.

    Order within a plan: first the requests that decode, one token each plus their drafts; then chunks of
    prompts within the token budget.  Waiting requests are admitted in the order of the aging queue, as
    long as there is a sequence slot and room for the whole prompt; none overtakes a request that has to
    wait for room.  When blocks run out, the admitted request that is due last is preempted, a best-effort
    request first.  Best-effort requests run when no other request has work; otherwise they take part in
    a step twice a second, and their own steps stay short for a while after other requests.

    Asynchronous scheduling: while a step runs, the next one can be planned.  `expect()` records the step
    in flight as if it had been run, with a placeholder for each token that it samples; `schedule()` may
    then be called before `update()`.  If a request ends meanwhile, what the next step computes for it is
    dropped; its blocks are free immediately, because the device runs steps in order.

    Invariants, checked by tests/batching/test_scheduler.py:

    - the output of a request depends only on the request
    - a request that is neither prefilling nor running holds no block
    - a plan never has more than `max_num_batched_tokens` tokens

    Ownership: `KVCacheManager` owns the blocks, `AdmissionQueue` the waiting requests, and this class the
    admitted ones.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._kv = KVCacheManager(config)
        self.block_manager = self._kv.block_manager
        self._admission = AdmissionQueue(config, self._kv)
        self._waiting = self._admission.waiting
        # Admitted requests, the one that is due first in front, best-effort ones behind all others.
        self._running: list[BatchRequest] = []
        self._residents = Residents()
        self._turns = BestEffortTurns()
        self._num_preemptions = 0
        self._expected: StepPlan | None = None
        self._spec_decode = SpecDecodeStats()

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def stats(self) -> SchedulerStats:
        blocks, prefix_cache = self.block_manager, self._kv.prefix_cache
        stats = SchedulerStats(
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            num_prefilling=sum(r.status is RequestStatus.PREFILLING for r in self._running),
            num_awaiting_prefix=self._admission.num_awaiting_prefix,
            block_size=self.config.block_size,
            num_blocks=blocks.num_blocks,
            num_free_blocks=blocks.num_free_blocks,
            num_cached_blocks=blocks.num_cached_blocks,
            num_preemptions=self._num_preemptions,
            num_evictions=blocks.num_evictions,
            num_queried_tokens=prefix_cache.num_queried_tokens,
            num_hit_tokens=prefix_cache.num_hit_tokens,
            num_aged_admissions=self._admission.num_aged_admissions,
            num_prefix_waits=self._admission.num_prefix_waits,
            num_drafts=self._spec_decode.num_drafts,
            num_draft_tokens=self._spec_decode.num_tokens,
            num_accepted_tokens=self._spec_decode.num_accepted,
        )
        return self._kv.add_to(stats)

    def num_prompts_and_streams(self) -> tuple[int, int]:
        """Return how many prompts are being prefilled or could be admitted, and how many requests decode.

        Best-effort requests count only if there are no others, since they pause beside others.
        """
        running, num_waiting = self._running, len(self._waiting)
        others, num_others = (
            [r for r in running if not r.is_best_effort],
            self._admission.num_others,
        )
        if others or num_others:
            running, num_waiting = others, num_others
        num_streams = sum(r.status is RequestStatus.RUNNING for r in running)
        num_admissible = min(num_waiting, self.config.max_num_seqs - len(running))
        return len(running) - num_streams + num_admissible, num_streams

    def expects_others(self, now: float) -> bool:
        """Return whether only best-effort requests are here and an interactive one may arrive soon."""
        has_others = self._admission.is_awaited or any(not r.is_best_effort for r in self._running)
        return not has_others and self._turns.expects_others(now)

    def snapshot(self, now: float) -> EngineSnapshot:
        """Return a picture of the queue, the requests and the pool; `now` is on the engine's clock."""
        return take_snapshot(
            self.stats(),
            self.config.max_num_seqs,
            self._running,
            self._waiting,
            self.block_manager,
            now,
        )

    def add(self, request: BatchRequest) -> None:
        """Queue a request together with its forks; `check_request` has accepted it."""
        num_tokens = request.num_prompt_tokens + request.spec.output_limit
        assert num_tokens <= self.config.max_request_tokens, "the request could not run alone"
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
            self._leave(request, RequestStatus.CANCELLED)
        request.forget_expected()
        if request.forks:
            self._promote_fork(request)

    def schedule(self, max_prefill_tokens: int | None = None, *, now: float = 0.0) -> StepPlan:
        """Plan the next step; admit and preempt requests as needed.

        max_prefill_tokens: the most prompt tokens that the step may process beside running requests, so
            that their inter-token latency stays low; None is no limit.  It does not apply if no request
            decodes, unless an interactive request is expected.
        now: when the step begins, in seconds on the engine's clock.
        """
        self.block_manager.now = now
        step = _Planning(now, max_prefill_tokens)
        others = [r for r in self._running if not r.is_best_effort]
        best_effort = self._running[len(others) :]
        if others or self._admission.is_awaited:
            self._turns.serve_others(now)
        is_due = self._turns.is_due(now)
        num_reserved = len(best_effort) if is_due else 0
        budget = self.config.max_num_batched_tokens - num_reserved
        slices = list(self._decodes(others, budget, step))
        if (num_reserved or not slices) and not self._admission.is_awaited:
            # Before others are admitted, or these would take the room, and one in flight be preempted.
            list(self._growing(best_effort, step))
        if not step.preempted:
            # A preempted request is first in the queue; it must not come back before the
            # room that it made is used.
            self._admit(now, is_best_effort_due=is_due)
        # Fewer, if some made way.
        num_reserved = min(num_reserved, sum(r.is_best_effort for r in self._running))
        budget = self.config.max_num_batched_tokens - num_reserved - sum(map(len, slices))
        slices += self._prefills(step.bounded(budget) if slices else budget)
        if self._runs_best_effort and (is_due or not slices):
            slices += self._best_effort(best_effort, slices, step)
            self._turns.serve(now)
        state_copies = () if self._kv.states is None else self._kv.states.take_copies()
        changes = self._residents.take_changes()
        return StepPlan(
            tuple(slices),
            self._kv.take_copies(),
            changes.preempted,
            state_copies,
            changes.started,
            changes.ended,
        )

    def update(
        self, plan: StepPlan, outputs: Sequence[SliceOutput]
    ) -> list[RequestOutput | RequestFailure]:
        """Record what a step computed; return an output for each request that advanced.

        outputs: one for each slice, in the order of the plan.
        """
        items: list[RequestOutput | RequestFailure] = []
        self._forget_expected()
        is_recorded, self._expected = plan is self._expected, None
        for s, output in zip(plan.slices, outputs, strict=True):
            request = self._residents.get(s.sequence_id)
            if request is None:
                # It has ended while the step was in flight.
                continue
            request.prompt_logprobs += output.prompt_logprobs
            if s.num_samples:
                items += self._sampled(request, s, output, is_recorded=is_recorded)
                continue
            if not is_recorded:
                self._kv.commit(request, s, s.stop)
            if output.vector is not None:
                items.append(self._end_pooled(request, output.vector))
            else:
                items += progress_outputs(request)
        return items

    def can_expect(self, plan: StepPlan, can_follow: Callable[[SamplingParams], bool]) -> bool:
        """Return whether the next step can be planned before the outputs of `plan` are known.

        That is not possible if the next step might contain drafts, preempt a request, stop a best-effort
        one for another request, or be empty.

        can_follow: whether the executor samples for such parameters before the token before is known.
        """
        current = [
            (s, request)
            for s in plan.slices
            if (request := self._residents.get(s.sequence_id)) is not None
        ]
        # Best-effort requests do not hinder drafts that begin a step without them.
        decoding = [r for r in self._running if r.status is RequestStatus.RUNNING]
        num_decoding = sum(not r.is_best_effort for r in decoding) or len(decoding)
        may_draft = self.config.max_draft_tokens > 0 and self._max_rows(num_decoding) > 1
        may_make_way = self._admission.is_awaited and self._runs_best_effort
        return (
            any(goes_on(s, request) for s, request in current)
            and not may_make_way
            and self._kv.has_room_to_grow(len(self._running))
            and all(is_predictable(s, request, may_draft=may_draft) for s, request in current)
            and all(can_follow(r.spec.sampling) for s, r in current if s.num_samples)
        )

    def expect(self, plan: StepPlan) -> None:
        """Record a step in flight as far as it is known, with placeholders for the tokens that it samples.

        The caller has checked `can_expect`.
        """
        self._expected = plan
        for s in plan.slices:
            request = self._residents.get(s.sequence_id)
            if request is None:
                continue
            self._kv.commit(request, s, s.stop)
            if s.num_samples:
                self._begin_decoding(request)
                request.expect_token()

    def discard(self, plan: StepPlan, failed_ids: Container[int] | None = None) -> None:
        """Drop a step that raised: cancel the requests at fault and restart all other admitted requests.

        The contents of the pool are lost, so the others are preempted and start over from their tokens, and
        the prefix cache is empty.

        failed_ids: the ids of the requests to cancel; None cancels every request of the step.
        """
        self._forget_expected()
        self._expected = None
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
        for request in list(self._running):
            self._preempt(request)
        self._kv.forget_cached()
        self._residents.forget()

    @property
    def _runs_best_effort(self) -> bool:
        """True if a best-effort request is admitted; these come last in `_running`."""
        return bool(self._running) and self._running[-1].is_best_effort

    def _best_effort(
        self, requests: Sequence[BatchRequest], others: Sequence[Slice], step: _Planning
    ) -> list[Slice]:
        """Return the slices of best-effort requests in a step that already has the slices `others`.

        requests: the best-effort requests that were admitted before this step.
        """
        budget = self.config.max_num_batched_tokens - sum(map(len, others))
        slices = list(self._decodes(requests, budget, step))
        budget -= sum(map(len, slices))
        if others or slices or self.expects_others(step.now):
            prefilling = [s for s in others if s.is_prefill]
            budget = step.bounded(budget, sum(map(len, prefilling)))
        return slices + self._prefills(budget, is_best_effort=True)

    def _admit(self, now: float, *, is_best_effort_due: bool) -> None:
        started = self._admission.admit(
            len(self._running), now, self._make_way, is_best_effort_due=is_best_effort_due
        )
        for request in started:
            insort(self._running, request, key=self._admission.running_key)

    def _make_way(self) -> BatchRequest | None:
        """Stop the best-effort request that is due last and return it; the caller queues it again."""
        if not self._runs_best_effort:
            return None
        victim = self._running[-1]
        self._stop(victim)
        return victim

    def _decodes(
        self, requests: Sequence[BatchRequest], budget: int, step: _Planning
    ) -> Iterator[Slice]:
        """Yield the slices of the requests that decode; `budget` is in tokens, drafts included."""
        num_decoding = sum(r.status is RequestStatus.RUNNING for r in requests)
        max_rows = self._max_rows(num_decoding)
        # Beyond one token each.
        budget -= num_decoding
        for request in self._growing(requests, step):
            if request.status is RequestStatus.RUNNING:
                s = self._decode(request, max_rows, 1 + budget)
                budget -= len(s) - 1
                yield s

    def _growing(self, requests: Sequence[BatchRequest], step: _Planning) -> Iterator[BatchRequest]:
        """Allocate room for the next token of each request; yield the requests that got it."""
        for request in requests:
            # A request that was preempted for another one is not admitted any more.
            if request.status is RequestStatus.WAITING or request.expects_last_token:
                continue
            if self._make_room(request, step):
                yield request

    def _max_rows(self, num_decoding: int) -> int:
        """Return how many tokens one decode and its drafts may have.

        Each request gets the same share, so that the one that is due first does not take it all.
        """
        max_rows = min(self.config.max_drafting_rows, self.config.max_num_batched_tokens)
        return max_rows // max(1, num_decoding)

    def _decode(self, request: BatchRequest, max_rows: int, budget: int) -> Slice:
        """Make the slice of a request that decodes: its pending tokens and up to `max_rows` with drafts.

        There is more than one pending token if rejected drafts made the recurrent state unusable, so that
        the tokens since the last kept state are processed again.
        """
        budget = self._kv.num_computable(request, budget)
        max_drafts = min(
            self.config.max_draft_tokens, min(max_rows, budget) - request.num_pending_tokens
        )
        drafts = self._drafts(request, max_drafts)
        stop = min(request.num_tokens, request.num_computed_tokens + budget)
        return self._make_slice(request, stop + len(drafts), drafts)

    def _drafts(self, request: BatchRequest, max_drafts: int) -> tuple[int, ...]:
        """Propose draft tokens, as many as the request's last block has room for."""
        if max_drafts < 1 or request.spec.constraint is not None or request.expects_token:
            return ()
        room = len(request.block_table) * self.config.block_size - request.num_tokens
        remaining = request.spec.output_limit - request.num_output_tokens - 1
        return request.drafter.draft(request.token_ids, min(max_drafts, room, remaining))

    def _make_room(self, request: BatchRequest, step: _Planning) -> bool:
        """Allocate room for the next token, preempting the request that is due last until it fits.

        Returns False if the request itself was preempted.  The preempted request has no slice in this plan
        yet, since slices are made in the order of `_running`.
        """
        while not self._kv.grow(request):
            victim = self._running[-1]
            self._preempt(victim)
            step.preempted.append(victim)
            if victim is request:
                return False
        return True

    def _prefills(self, budget: int, *, is_best_effort: bool = False) -> list[Slice]:
        prefilling = [
            r
            for r in self._running
            if r.status is RequestStatus.PREFILLING and r.is_best_effort is is_best_effort
        ]
        num_pending = [r.num_pending_tokens for r in prefilling]
        granted = share_prefill_budget(num_pending, budget, self.config.prefill_chunk)
        slices: list[Slice] = []
        for request, num_granted in zip(prefilling, granted, strict=True):
            # Each slice takes blocks, of which the next one has fewer.
            if num_tokens := self._kv.num_computable(request, num_granted):
                slices.append(self._chunk(request, num_tokens))
        return slices

    def _chunk(self, request: BatchRequest, num_tokens: int) -> Slice:
        """Make the slice of a prefill; its last chunk also samples the first tokens of the forks."""
        stop = request.num_computed_tokens + num_tokens
        forks = tuple(request.forks) if stop == request.num_tokens else ()
        return self._make_slice(request, stop, forks=forks)

    def _make_slice(
        self,
        request: BatchRequest,
        stop: int,
        drafts: tuple[int, ...] = (),
        forks: tuple[BatchRequest, ...] = (),
    ) -> Slice:
        # Of a step that is planned while another one is in flight.
        may_end = self._expected is not None
        for each in (request, *forks):
            self._residents.start(each)
        return self._kv.make_slice(request, stop, drafts, forks, may_end=may_end)

    def _sampled(
        self, request: BatchRequest, s: Slice, output: SliceOutput, *, is_recorded: bool
    ) -> list[RequestOutput | RequestFailure]:
        """Record the sampled tokens of a slice, for its request and for its forks."""
        # The forks first: they share the blocks that the request releases when it ends.
        if not s.forks:
            return [self._apply_output(request, s, output, is_recorded=is_recorded)]
        forks = [
            self._start_fork(request, fork, s, i, output)
            for i, fork_id in enumerate(s.forks)
            if (fork := self._residents.get(fork_id)) is not None
        ]
        return [self._apply_output(request, s, output, is_recorded=is_recorded), *forks]

    def _apply_output(
        self, request: BatchRequest, s: Slice, output: SliceOutput, *, is_recorded: bool
    ) -> RequestOutput | RequestFailure:
        """Append the sampled tokens to a request, up to the first draft that was wrong."""
        token_ids = append_sampled(request, s, output)
        if s.num_drafts:
            num_accepted = len(token_ids) - 1
            request.drafter.record(request.num_tokens, s.num_drafts, num_accepted)
            self._spec_decode.record(s.num_drafts, num_accepted)
        if not is_recorded:
            # The last token is the one that the model has not processed yet.
            self._kv.commit(request, s, request.num_tokens - 1)
            self._begin_decoding(request)
        logprobs = output.logprobs[: len(token_ids)]
        return self._make_output(request, token_ids, logprobs, output)

    def _begin_decoding(self, request: BatchRequest) -> None:
        if request.status is RequestStatus.PREFILLING:
            request.move_to(RequestStatus.RUNNING)

    def _forget_expected(self) -> None:
        if self._expected is not None:
            for s in self._expected.slices:
                if (request := self._residents.get(s.sequence_id)) is not None:
                    request.forget_expected()

    def _start_fork(
        self, request: BatchRequest, fork: BatchRequest, s: Slice, index: int, output: SliceOutput
    ) -> RequestOutput | RequestFailure:
        """Start another choice on the shared blocks of the prompt, with its first token."""
        position = s.num_samples + index
        fork.fork_of = None
        request.forks.remove(fork)
        self._kv.fork(request, fork, s.stop)
        fork.scheduled_time = request.scheduled_time
        fork.move_to(RequestStatus.PREFILLING)
        fork.move_to(RequestStatus.RUNNING)
        insort(self._running, fork, key=self._admission.running_key)
        token_id = output.token_ids[position]
        fork.append(token_id, is_complete=fork.request_id in output.completed)
        logprobs = output.logprobs[position : position + 1]
        made = self._make_output(fork, (token_id,), logprobs, output)
        if fork.status is RequestStatus.RUNNING:
            if len(self._running) > self.config.max_num_seqs:
                self._requeue(fork)
            elif self._kv.states is not None:
                self._kv.states.fork(request, fork, s.stop)
        return made

    def _make_output(
        self,
        request: BatchRequest,
        token_ids: tuple[int, ...],
        logprobs: Sequence[TokenLogprobs],
        output: SliceOutput,
    ) -> RequestOutput | RequestFailure:
        """Return the output for new tokens; a request that ends with them leaves the batch."""
        if output.errors and (error := dict(output.errors).get(request.request_id)) is not None:
            self._leave(request, RequestStatus.CANCELLED)
            return RequestFailure(request.request_id, RequestFailed(error))
        if request.finish_reason is not None:
            self._leave(request, RequestStatus.COMPLETED)
        return RequestOutput(request.request_id, token_output(request, token_ids, logprobs))

    def _end_pooled(self, request: BatchRequest, vector: Vector) -> RequestOutput:
        """End a request with pooling and return its vector."""
        request.finish_reason = FinishReason.STOP
        request.move_to(RequestStatus.RUNNING)
        self._leave(request, RequestStatus.COMPLETED)
        return embedding_output(request, vector)

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

    def _preempt(self, request: BatchRequest) -> None:
        self._stop(request)
        self._admission.push(request)

    def _stop(self, request: BatchRequest) -> None:
        self._suspend(request)
        request.num_preemptions += 1
        self._num_preemptions += 1

    def _requeue(self, request: BatchRequest) -> None:
        self._suspend(request)
        self._admission.push(request)

    def _suspend(self, request: BatchRequest) -> None:
        """Free a request's blocks; it keeps its tokens and its position in the queue."""
        self._leave(request, RequestStatus.WAITING)
        if not request.num_output_tokens:
            request.prompt_logprobs.clear()

    def _leave(self, request: BatchRequest, status: RequestStatus) -> None:
        request.move_to(status)
        key = self._admission.running_key(request)
        del self._running[bisect_left(self._running, key, key=self._admission.running_key)]
        self._kv.release(request, key)
        self._residents.end(request)
