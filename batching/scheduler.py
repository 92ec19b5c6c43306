"""Decides, before each step, which tokens of which requests the model reads next."""

from bisect import bisect_left, insort
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from batching.block_manager import BlockCopy, BlockHash, NoFreeBlocks, PagedBlockManager
from batching.config import SchedulerConfig
from batching.errors import ContextLengthExceeded, EngineError, RequestFailed
from batching.prefix_cache import PrefixCache
from batching.priority_queue import PriorityQueueWithAging
from batching.request import BatchRequest, RequestStatus, TokenLogprobs, TokenOutput
from batching.scheduling.step_plan import Slice, SliceOutput, StepPlan


class SchedulerStats(NamedTuple):
    """Counts of now (`num_waiting` ... `num_cached_blocks`) and since the start.

    block_size: in tokens.
    num_awaiting_prefix: of those that wait, whose prefix was being computed at the last plan.
    num_aged_admissions: requests that went before a waiting one of a more urgent class.
    num_prefix_waits: requests that waited for another one to compute their prefix.
    """

    num_waiting: int
    num_running: int
    num_prefilling: int
    num_awaiting_prefix: int
    block_size: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_preemptions: int
    num_evictions: int
    num_queried_tokens: int
    num_hit_tokens: int
    num_aged_admissions: int
    num_prefix_waits: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int


@dataclass(slots=True)
class SpecDecodeStats:
    """How many guesses were checked, of how many tokens, and how many of these were right."""

    num_drafts: int = 0
    num_tokens: int = 0
    num_accepted: int = 0

    def record(self, num_tokens: int, num_accepted: int) -> None:
        self.num_drafts += 1
        self.num_tokens += num_tokens
        self.num_accepted += num_accepted


class RequestOutput(NamedTuple):
    request_id: int
    output: TokenOutput


class RequestFailure(NamedTuple):
    request_id: int
    error: EngineError


class ContinuousBatchingScheduler:
    """Iteration-level scheduling (Orca, Yu et al. 2022) over a paged KV cache.

    Pure: no thread, no clock, no tensors.  A step is `schedule()`, running the plan, and
    `update()` with the sampled tokens; between two steps requests are added and aborted.

    A plan reads first one token of each request that decodes, then chunks of prompts
    within the token budget.  Requests are admitted in the aged order of the queue, as long
    as there is a seat and room for the whole prompt, and nobody overtakes one that must
    wait.  When blocks run out, the running request that is due last gives up its own.

    Invariants, checked by tests/batching/test_scheduler.py:

    - what a request is answered depends on nothing but the request
    - a request that is neither running nor prefilling holds no block
    - the tokens of a plan never exceed `max_batched_tokens`
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.block_manager = PagedBlockManager(config.num_blocks, config.block_size)
        self.prefix_cache = PrefixCache(self.block_manager)
        self.waiting: PriorityQueueWithAging[BatchRequest] = PriorityQueueWithAging(
            config.aging_rate
        )
        # Admitted requests, the one that is due first in front.
        self.running: list[BatchRequest] = []
        self.num_preemptions = 0
        self.num_aged_admissions = 0
        self.num_prefix_waits = 0
        self._awaiting_prefix: set[int] = set()
        self._drafts_made = SpecDecodeStats()
        self._now = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_waiting=len(self.waiting),
            num_running=len(self.running),
            num_prefilling=sum(r.status is RequestStatus.PREFILLING for r in self.running),
            num_awaiting_prefix=min(len(self._awaiting_prefix), len(self.waiting)),
            block_size=self.config.block_size,
            num_blocks=self.block_manager.num_blocks,
            num_free_blocks=self.block_manager.num_free_blocks,
            num_cached_blocks=self.block_manager.num_cached_blocks,
            num_preemptions=self.num_preemptions,
            num_evictions=self.block_manager.num_evictions,
            num_queried_tokens=self.prefix_cache.num_queried_tokens,
            num_hit_tokens=self.prefix_cache.num_hit_tokens,
            num_aged_admissions=self.num_aged_admissions,
            num_prefix_waits=self.num_prefix_waits,
            num_drafts=self._drafts_made.num_drafts,
            num_draft_tokens=self._drafts_made.num_tokens,
            num_accepted_tokens=self._drafts_made.num_accepted,
        )

    def check(self, request: BatchRequest) -> None:
        """Raise ContextLengthExceeded if a request could not even run alone."""
        limit = self.config.max_request_tokens
        if request.num_prompt_tokens + request.max_tokens > limit:
            raise ContextLengthExceeded(request.num_prompt_tokens, request.max_tokens, limit)

    def add(self, request: BatchRequest) -> None:
        """Queue a request, and with it its forks.

        Raises:
            ContextLengthExceeded: it could not even run alone.
        """
        self.check(request)
        self.waiting.push(request)

    def abort(self, request: BatchRequest) -> None:
        """End a request wherever it stands; nothing happens if it has ended."""
        if request.status is RequestStatus.WAITING:
            if request.fork_of is None:
                self.waiting.remove(request)
            else:
                request.fork_of.forks.remove(request)
            request.move_to(RequestStatus.CANCELLED)
        elif request.status in (RequestStatus.PREFILLING, RequestStatus.RUNNING):
            self._leave(request, RequestStatus.CANCELLED)
        if request.forks:
            self._promote_fork(request)

    def schedule(self, max_prefill_tokens: int | None = None, *, now: float = 0.0) -> StepPlan:
        """Plan the next step, which begins at `now`.

        `max_prefill_tokens` bounds the prompt tokens beside running streams, so that these
        do not stall; without any running stream it does not apply.
        """
        self._now = self.block_manager.now = now
        copies: list[BlockCopy] = []
        preempted: list[BatchRequest] = []
        slices = list(self._decodes(copies, preempted))
        budget = self.config.max_batched_tokens - sum(map(len, slices))
        if slices and max_prefill_tokens is not None:
            budget = min(budget, max_prefill_tokens)
        if not preempted:
            # Who was preempted comes first in the queue; it must not come back before
            # the room it made has been used.
            self._admit()
        slices += self._prefills(budget)
        return StepPlan(tuple(slices), tuple(copies), tuple(preempted))

    def update(
        self, plan: StepPlan, outputs: Sequence[SliceOutput]
    ) -> list[RequestOutput | RequestFailure]:
        """Record what a step did; return what the requests got that were given a token."""
        given: list[RequestOutput | RequestFailure] = []
        for s, output in zip(plan.slices, outputs, strict=True):
            s.request.prompt_logprobs += output.prompt_logprobs
            if s.samples:
                # The forks first: they share what the request gives back when it ends.
                forks = [self._give_fork(s, i, output) for i in range(len(s.forks))]
                given += [self._give(s, output), *forks]
            else:
                self._commit(s, s.stop)
                given += self._progress(s.request)
        return given

    def discard(self, plan: StepPlan, to_blame: Container[int] | None = None) -> None:
        """Give up on a step that raised, and cancel the requests that end with it.

        `to_blame` are their ids; None is all that the step served.  The pool's contents are
        lost, so everybody else who was admitted starts over from its tokens, and nothing
        stays cached.
        """
        for s in plan.slices:
            served = dict.fromkeys([s.request, *s.forks, *s.request.forks])
            if to_blame is None or any(r.request_id in to_blame for r in served):
                # The last one first, so that no fork is left to read the prompt by itself.
                for request in reversed(served):
                    self.abort(request)
        for request in list(self.running):
            self._preempt(request)
        self.block_manager.forget_cached()

    # Decodes

    def _decodes(self, copies: list[BlockCopy], preempted: list[BatchRequest]) -> Iterator[Slice]:
        decoding = [r for r in self.running if r.status is RequestStatus.RUNNING]
        # The same share for everyone, so that who is due first does not take it all.
        max_drafts = min(
            self.config.max_draft_tokens,
            self.config.max_drafting_rows // max(1, len(decoding)) - 1,
            self.config.max_batched_tokens // max(1, len(decoding)) - 1,
        )
        for request in decoding:
            # Who was preempted for another one is not running any more.
            if request.status is RequestStatus.RUNNING and self._make_room(
                request, copies, preempted
            ):
                drafts = self._drafts(request, max_drafts)
                stop = request.num_tokens + len(drafts)
                yield Slice(request, request.num_computed_tokens, stop, drafts)

    def _drafts(self, request: BatchRequest, max_drafts: int) -> tuple[int, ...]:
        """Guess tokens for which there is room in the request's last block."""
        if max_drafts < 1 or request.sampling.depends_on_output or request.constraint is not None:
            return ()
        room = len(request.block_table) * self.config.block_size - request.num_tokens
        wanted = request.max_tokens - request.num_output_tokens - 1
        return request.lookup.draft(request.token_ids, min(max_drafts, room, wanted))

    def _make_room(
        self, request: BatchRequest, copies: list[BlockCopy], preempted: list[BatchRequest]
    ) -> bool:
        """Get a slot for the next token, if need be from whoever is due last.

        False if that was the request itself.  Whoever is due later has no slice yet, since
        slices are made in the order of `running`.
        """
        while not self._grow(request, copies):
            victim = self.running[-1]
            self._preempt(victim)
            preempted.append(victim)
            if victim is request:
                return False
        return True

    def _grow(self, request: BatchRequest, copies: list[BlockCopy]) -> bool:
        """Make room for all tokens of a request; False, and no change, if there is none."""
        table = request.block_table
        missing = self.block_manager.blocks_for(request.num_tokens) - len(table)
        if missing == 0:
            return self._make_writable(request, copies)
        if (block_ids := self.block_manager.allocate(missing, table.last_block)) is None:
            return False
        table.extend(block_ids)
        return True

    def _make_writable(self, request: BatchRequest, copies: list[BlockCopy]) -> bool:
        """Make the block that is written next the request's own."""
        index = request.num_computed_tokens // self.config.block_size
        try:
            copy = self.block_manager.make_writable(request.block_table, index)
        except NoFreeBlocks:
            return False
        if copy is not None:
            copies.append(copy)
        return True

    # Admissions

    def _admit(self) -> None:
        """Admit in the queue's order, until a seat or the blocks are missing.

        A request whose prefix is being computed right now waits for it: it keeps its place,
        and a seat and the blocks it will need are kept for it.
        """
        deferred: list[BatchRequest] = []
        num_kept_blocks = 0
        while self.waiting and len(self.running) + len(deferred) < self.config.max_num_seqs:
            request = self.waiting.peek()
            cached = self._cached_blocks(request)
            # A cached block that nobody holds leaves the free ones when it is shared.
            num_idle = sum(not self.block_manager.blocks[b].ref_count for b in cached)
            missing = self.block_manager.blocks_for(request.num_tokens) - len(cached)
            if missing + num_idle + num_kept_blocks > self.block_manager.num_free_blocks:
                break
            self.waiting.pop()
            if self._awaits_prefix(request, len(cached)):
                deferred.append(request)
                num_kept_blocks += missing + num_idle
            else:
                self._start(request, cached)
        awaiting = {request.request_id for request in deferred}
        self.num_prefix_waits += len(awaiting - self._awaiting_prefix)
        self._awaiting_prefix = awaiting
        for request in deferred:
            self.waiting.push(request)

    def _start(self, request: BatchRequest, cached: list[int]) -> None:
        for block_id in cached:
            self.block_manager.increment_ref(block_id)
        request.block_table.extend(cached)
        taken = self._grow(request, [])
        assert taken, "room was checked"
        request.num_computed_tokens = len(cached) * self.config.block_size
        if request.scheduled_time is None:
            request.scheduled_time = self._now
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
            self.prefix_cache.record(request.num_tokens, request.num_cached_tokens)
        self.num_aged_admissions += self.waiting.has_more_urgent(request.priority)
        request.move_to(RequestStatus.PREFILLING)
        insort(self.running, request, key=self.waiting.key)
        self.prefix_cache.claim(self._hashes(request)[len(cached) :], self.waiting.key(request))

    def _cached_blocks(self, request: BatchRequest) -> list[int]:
        return self.prefix_cache.lookup(self._hashes(request)[: self._max_shared(request)])

    def _awaits_prefix(self, request: BatchRequest, num_cached_blocks: int) -> bool:
        """True if the next block it could share is being computed right now."""
        next_one = self._hashes(request)[: self._max_shared(request)][num_cached_blocks:][:1]
        key = self.waiting.key(request)
        return any(self.prefix_cache.is_claimed(block_hash, key) for block_hash in next_one)

    def _max_shared(self, request: BatchRequest) -> int:
        """The last token is always read: its logits are what the answer begins with."""
        if request.wants_prompt_logprobs:
            return 0
        return (request.num_tokens - 1) // self.config.block_size

    def _hashes(self, request: BatchRequest) -> list[BlockHash]:
        if not self.config.enable_prefix_cache:
            return []
        return request.hashes.extended(request.token_ids, self.config.block_size)

    # Prefills

    def _prefills(self, budget: int) -> list[Slice]:
        """Share the budget among the prompts that are being read.

        Half goes to the one that is due first, so that it always moves on; the rest goes
        to the shortest ones, so that they do not wait for a long one's whole prefill.
        """
        prefilling = [r for r in self.running if r.status is RequestStatus.PREFILLING]
        if not prefilling:
            return []
        grants = dict.fromkeys((r.request_id for r in prefilling), 0)
        shortest_first = sorted(prefilling, key=lambda r: r.num_pending_tokens)
        shares = [(prefilling[0], -(-budget // 2)), *((r, budget) for r in shortest_first)]
        for request, share in shares:
            granted = grants[request.request_id]
            wanted = min(request.num_pending_tokens, self.config.prefill_chunk) - granted
            more = min(wanted, share, budget)
            grants[request.request_id] += more
            budget -= more
        return [self._chunk(r, grants[r.request_id]) for r in prefilling if grants[r.request_id]]

    def _chunk(self, request: BatchRequest, num_tokens: int) -> Slice:
        stop = request.num_computed_tokens + num_tokens
        forks = tuple(request.forks) if stop == request.num_tokens else ()
        return Slice(request, request.num_computed_tokens, stop, forks=forks)

    # After the step, and leaving

    def _give(self, s: Slice, output: SliceOutput) -> RequestOutput | RequestFailure:
        """Give a request what was sampled, as far as the model read the right tokens."""
        request, sampled = s.request, output.token_ids[: s.num_samples]
        pairs = zip(sampled, (*s.drafts, None), strict=True)
        num_right = next(i for i, (token_id, draft) in enumerate(pairs) if token_id != draft)
        given: list[int] = []
        for token_id in sampled[: num_right + 1]:
            request.append(token_id)
            given.append(token_id)
            if request.finish_reason is not None:
                break
        if s.drafts:
            request.lookup.record(request.num_tokens, len(s.drafts), len(given) - 1)
            self._drafts_made.record(len(s.drafts), len(given) - 1)
        # The last token given is the one that nobody has read yet.
        self._commit(s, request.num_tokens - 1)
        if request.status is RequestStatus.PREFILLING:
            request.move_to(RequestStatus.RUNNING)
        return self._told(request, tuple(given), tuple(output.logprobs[: len(given)]))

    def _give_fork(
        self, s: Slice, index: int, output: SliceOutput
    ) -> RequestOutput | RequestFailure:
        """Let another answer begin with the blocks of the prompt, which it shares."""
        request, place = s.forks[index], s.num_samples + index
        request.fork_of = None
        s.request.forks.remove(request)
        request.block_table = self.block_manager.fork(s.request.block_table)
        request.num_computed_tokens = s.stop
        request.num_cached_tokens = s.request.num_cached_tokens
        request.scheduled_time = s.request.scheduled_time
        request.move_to(RequestStatus.PREFILLING)
        request.move_to(RequestStatus.RUNNING)
        insort(self.running, request, key=self.waiting.key)
        token_id = output.token_ids[place]
        request.append(token_id)
        told = self._told(request, (token_id,), tuple(output.logprobs[place : place + 1]))
        if request.status is RequestStatus.RUNNING and len(self.running) > self.config.max_num_seqs:
            self._requeue(request)
        return told

    def _told(
        self,
        request: BatchRequest,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
    ) -> RequestOutput | RequestFailure:
        """Return what a request is told of its new tokens, and let it leave if these are its last."""
        if request.constraint is not None and (error := request.constraint.error) is not None:
            self._leave(request, RequestStatus.CANCELLED)
            return RequestFailure(request.request_id, RequestFailed(error))
        is_first = request.num_output_tokens == len(token_ids)
        if request.finish_reason is not None:
            self._leave(request, RequestStatus.COMPLETED)
        return RequestOutput(
            request.request_id,
            TokenOutput(
                token_ids,
                request.finish_reason,
                request.num_cached_tokens,
                logprobs,
                tuple(request.prompt_logprobs) if is_first else (),
                scheduled_time=request.scheduled_time or 0.0,
                num_preemptions=request.num_preemptions,
            ),
        )

    def _progress(self, request: BatchRequest) -> Iterator[RequestOutput]:
        """Yield how far a prompt is read, for those who ask."""
        if request.reports_progress:
            yield RequestOutput(
                request.request_id,
                TokenOutput(
                    (), None, request.num_cached_tokens, num_read_tokens=request.num_computed_tokens
                ),
            )

    def _promote_fork(self, request: BatchRequest) -> None:
        """Let the first answer that waits for a request that has gone read the prompt itself."""
        first, *others = request.forks
        request.forks = []
        first.fork_of = None
        first.forks = others
        for fork in others:
            fork.fork_of = first
        self.waiting.push(first)

    def _commit(self, s: Slice, stop: int) -> None:
        """Record that the model has read a request up to `stop`; full blocks can be shared now."""
        request = s.request
        request.num_computed_tokens = stop
        hashes = self._hashes(request)
        first, last = s.start // self.config.block_size, stop // self.config.block_size
        self.prefix_cache.insert(hashes, request.block_table, first, min(last, len(hashes)))

    def _preempt(self, request: BatchRequest) -> None:
        self._requeue(request)
        request.num_preemptions += 1
        self.num_preemptions += 1

    def _requeue(self, request: BatchRequest) -> None:
        """Take a request's blocks; its tokens stay, and it goes back to its place in line."""
        self._leave(request, RequestStatus.WAITING)
        request.num_computed_tokens = 0
        if not request.num_output_tokens:
            request.prompt_logprobs.clear()
        self.waiting.push(request)

    def _leave(self, request: BatchRequest, status: RequestStatus) -> None:
        request.move_to(status)
        del self.running[bisect_left(self.running, self.waiting.key(request), key=self.waiting.key)]
        self.prefix_cache.drop_claims(self._hashes(request), self.waiting.key(request))
        self.block_manager.release(request.block_table.block_ids)
        request.block_table.clear()
