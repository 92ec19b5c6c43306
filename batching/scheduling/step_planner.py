"""Chooses the tokens of one step: decodes with their drafts, then chunks of prompts."""

from collections.abc import Iterator, Sequence

from batching.config import SchedulerConfig
from batching.kv_cache.manager import KVCacheManager
from batching.request import BatchRequest, RequestStatus
from batching.scheduling.image_encoding import ImageEncoding
from batching.scheduling.prefill_budget import share_prefill_budget
from batching.scheduling.residents import Residents
from batching.scheduling.running import RunningRequests
from batching.steps.step_plan import RestoreOrder, Slice


def max_decode_rows(config: SchedulerConfig, num_decoding: int, num_rows: int = 0) -> int:
    """Return how many tokens one decode and its drafts may have.

    Each request gets the same share, so that the one that is due first does not take it all.

    num_rows: the tokens of other decodes and their drafts that the step has already.
    """
    max_rows = min(config.max_drafting_rows, config.max_num_batched_tokens) - num_rows
    return max_rows // max(1, num_decoding)


class StepPlanner:
    """Collects the slices of one step, and preempts requests where blocks run out.

    slices: the slices so far, in the order of the plan.
    restores: what is restored before them.
    has_preempted: whether a request lost its blocks to another one in this step.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        running: RunningRequests,
        residents: Residents,
        images: ImageEncoding,
        max_prefill_tokens: int | None,
        max_restore_seconds: float,
        *,
        may_end: bool,
    ) -> None:
        """Begin a step without slices.

        max_prefill_tokens: the most prompt tokens; None is no limit but that of all tokens.
        max_restore_seconds: that restoring from the store may take; one block is always possible.
        may_end: a request may end before the step runs, because another one is in flight.
        """
        self.slices: list[Slice] = []
        self.restores: list[RestoreOrder] = []
        self.has_preempted = False
        self._config = config
        self._kv = kv
        self._running = running
        self._residents = residents
        self._images = images
        self._max_prefill_tokens = max_prefill_tokens
        self._max_restore_seconds = max_restore_seconds
        self._may_end = may_end

    def add_decodes(self, requests: Sequence[BatchRequest], num_reserved: int = 0) -> None:
        """Add a slice for each of these requests that decodes.

        num_reserved: tokens of the step that are kept for other requests.
        """
        num_decoding = sum(r.status is RequestStatus.RUNNING for r in requests)
        num_rows = sum(len(s) for s in self.slices if not s.is_prefill)
        max_rows = max_decode_rows(self._config, num_decoding, num_rows)
        # The tokens beyond one for each request.
        budget = self._budget(num_reserved) - num_decoding
        for request in self._growing(requests):
            if request.status is RequestStatus.RUNNING:
                s = self._decode(request, max_rows, 1 + budget)
                budget -= len(s) - 1
                self.slices.append(s)

    def make_room(self, requests: Sequence[BatchRequest]) -> bool:
        """Allocate room for the next token of each of these requests; return whether one of them decodes."""
        return RequestStatus.RUNNING in [r.status for r in self._growing(requests)]

    def add_prefills(self, *, is_best_effort: bool, num_reserved: int = 0) -> None:
        """Add chunks of the prompts of either best-effort requests or all others."""
        prefilling = [
            r
            for r in self._running.requests
            if r.status is RequestStatus.PREFILLING and r.is_best_effort is is_best_effort
        ]
        budget = self._prefill_budget(num_reserved)
        if not prefilling or not budget:
            return
        has_streams = any(not s.is_prefill for s in self.slices)
        num_pending = [self._reach(r, has_streams=has_streams) for r in prefilling]
        if has_streams and self._images.has_order:
            return
        budget = max(0, budget - self._add_saved_span(prefilling, num_pending, num_reserved))
        due_first = min(range(len(prefilling)), key=lambda i: self._running.due_key(prefilling[i]))
        granted = share_prefill_budget(num_pending, budget, self._config.prefill_chunk, due_first)
        for request, num_granted in zip(prefilling, granted, strict=True):
            # Each slice takes blocks, so that fewer are left for the next one.
            if num_tokens := self._num_uncut(request, num_granted):
                self.slices.append(self._chunk(request, num_tokens))

    def _reach(self, request: BatchRequest, *, has_streams: bool) -> int:
        """Return how many pending tokens of a prompt can be processed, after what is restored of it."""
        if self._max_restore_seconds > 0:
            orders, seconds = self._kv.restore(request, self._max_restore_seconds)
            self.restores += orders
            self._max_restore_seconds -= seconds
        if self._kv.is_restoring(request):
            return 0
        return self._images.reach(request, has_streams=has_streams)

    def _add_saved_span(
        self, prefilling: Sequence[BatchRequest], num_pending: list[int], num_reserved: int
    ) -> int:
        """Add the slice of one span for which a prompt has saved enough tokens; return how many it has.

        num_pending: the tokens that each prompt may process; those of this one become 0.
        """
        for i, request in enumerate(prefilling):
            most = min(request.num_saved_tokens, num_pending[i], self._budget(num_reserved))
            least = request.num_inseparable
            if 1 < least <= most and (num_tokens := self._num_uncut(request, least)):
                self.slices.append(self._chunk(request, num_tokens))
                num_pending[i] = 0
                return num_tokens
        return 0

    def _num_uncut(self, request: BatchRequest, num_granted: int) -> int:
        """Return how many of the tokens that a prompt was granted it can process without cutting a span.

        Where a span is longer, the prompt saves its tokens until it can have all of the span in one step; nothing
        else in a step makes it wait.
        """
        start, least = request.num_computed_tokens, request.num_inseparable
        wanted = least if num_granted and not self.slices else 0
        num_tokens = self._kv.num_computable(request, max(num_granted, wanted))
        num_tokens = request.spans.whole_stop(start, start + num_tokens) - start
        if num_tokens < least:
            request.num_saved_tokens += num_granted
            return 0
        request.num_saved_tokens = 0
        return num_tokens

    def _budget(self, num_reserved: int) -> int:
        return self._config.max_num_batched_tokens - num_reserved - sum(map(len, self.slices))

    def _prefill_budget(self, num_reserved: int) -> int:
        budget = self._budget(num_reserved)
        if self._max_prefill_tokens is None:
            return budget
        if not self.slices:
            # No step is empty.
            return min(budget, max(1, self._max_prefill_tokens))
        num_prefilled = sum(len(s) for s in self.slices if s.is_prefill)
        return min(budget, max(0, self._max_prefill_tokens - num_prefilled))

    def _growing(self, requests: Sequence[BatchRequest]) -> Iterator[BatchRequest]:
        """Allocate room for the next token of each request; yield the requests that got it."""
        for request in requests:
            # A request that was preempted for another one is not admitted any more.
            if request.status is RequestStatus.WAITING or request.expects_last_token:
                continue
            if self._grow(request):
                yield request

    def _grow(self, request: BatchRequest) -> bool:
        """Allocate room for the next token, preempting the last request of the batch until it fits.

        Returns False if the request itself was preempted.  The preempted request has no slice in this plan
        yet, since slices are made in the order of the running requests.
        """
        while not self._kv.grow(request):
            victim = self._running.requests[-1]
            self._running.preempt(victim)
            self.has_preempted = True
            if victim is request:
                return False
        return True

    def _decode(self, request: BatchRequest, max_rows: int, budget: int) -> Slice:
        """Make the slice of a request that decodes: its pending tokens and up to `max_rows` with drafts.

        There is more than one pending token if rejected drafts made the recurrent state unusable, so that
        the tokens since the last kept state are processed again.
        """
        budget = self._kv.num_computable(request, budget)
        max_drafts = min(
            self._config.max_draft_tokens, min(max_rows, budget) - request.num_pending_tokens
        )
        drafts = self._drafts(request, max_drafts)
        stop = min(request.num_tokens, request.num_computed_tokens + budget)
        return self._make_slice(request, stop + len(drafts), drafts)

    def _drafts(self, request: BatchRequest, max_drafts: int) -> tuple[int, ...]:
        """Propose draft tokens, as many as the request's last block has room for."""
        max_drafts = min(max_drafts, request.num_free - 1)
        if max_drafts < 1 or request.expects_token:
            return ()
        room = len(request.block_table) * self._config.block_size - request.num_tokens
        remaining = request.spec.output_limit - request.num_output_tokens - 1
        return request.drafter.draft(request.token_ids, min(max_drafts, room, remaining))

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
        for each in (request, *forks):
            self._residents.start(each)
        return self._kv.make_slice(request, stop, drafts, forks, may_end=self._may_end)
