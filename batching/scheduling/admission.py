"""Admission into the batch: which waiting requests start, and when."""

from collections.abc import Callable, Iterable
from functools import reduce
from math import inf

from batching.config import SchedulerConfig
from batching.kv_cache.manager import KVCacheManager, NumBlocks
from batching.kv_cache.prefix_lookup import PrefixHit
from batching.priority_queue import PriorityQueueWithAging, QueueKey
from batching.request import BatchRequest, RequestStatus


class AdmissionQueue:
    """The waiting requests, admitted in the order of the aging queue.

    No request overtakes one that has to wait for room.  Best-effort requests make way for others: if an
    interactive request is first and there is no room for it, best-effort requests are stopped and queued
    again, and no best-effort request starts until it has started.

    num_aged_admissions: requests that were admitted before a waiting one of a more urgent class.
    num_prefix_waits: requests that waited for another one to compute their prefix.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self.waiting: PriorityQueueWithAging[BatchRequest] = PriorityQueueWithAging(
            config.aging_rate
        )
        self.num_aged_admissions = 0
        self.num_prefix_waits = 0
        self._awaiting_prefix: set[int] = set()
        self._num_best_effort = 0
        # Best-effort requests were stopped for it.
        self._starts_next: BatchRequest | None = None
        self._max_num_seqs = config.max_num_seqs
        self._kv = kv

    @property
    def num_awaiting_prefix(self) -> int:
        """How many waiting requests waited for a prefix when the last step was planned."""
        return min(len(self._awaiting_prefix), len(self.waiting))

    @property
    def is_awaited(self) -> bool:
        """True if a request is waiting that best-effort requests make way for."""
        return self.num_others > 0

    @property
    def num_others(self) -> int:
        """How many waiting requests are not best-effort requests."""
        return len(self.waiting) - self._num_best_effort

    @property
    def num_best_effort(self) -> int:
        return self._num_best_effort

    def startable(self, num_running: int) -> BatchRequest | None:
        """Return the first waiting request that is no best-effort request, if there is room for it.

        num_running: the requests that would not make way for it.
        """
        if not self.is_awaited or num_running >= self._max_num_seqs:
            return None
        in_order = self.waiting.first(1 + self._num_best_effort)
        request = next(r for r in in_order if not r.is_best_effort)
        return None if self._fitting(request, ()) is None else request

    def push(self, request: BatchRequest) -> None:
        self.waiting.push(request)
        self._num_best_effort += request.is_best_effort

    def remove(self, request: BatchRequest) -> None:
        self.waiting.remove(request)
        self._num_best_effort -= request.is_best_effort
        if request is self._starts_next:
            self._starts_next = None

    def running_key(self, request: BatchRequest) -> QueueKey:
        """Return the sort key of an admitted request: by due time, best-effort requests last."""
        key = self.waiting.key(request)
        return key._replace(due_time=inf) if request.is_best_effort else key

    def admit(
        self,
        num_running: int,
        now: float,
        make_way: Callable[[], BatchRequest | None],
        *,
        is_best_effort_due: bool,
    ) -> list[BatchRequest]:
        """Start waiting requests in order, until there is no sequence slot or not enough blocks.

        A request whose prefix another request is computing right now waits for that: it keeps its position,
        and a sequence slot and the blocks that it will need stay reserved for it.

        make_way: stops a best-effort request and returns it, None if none is running; it is queued again
            after the others have started.
        is_best_effort_due: best-effort requests take part in this step; otherwise they start only if no
            other request waits, since the next step might stop them.
        """
        started: list[BatchRequest] = []
        deferred: dict[BatchRequest, NumBlocks] = {}
        passed_over: list[BatchRequest] = []
        while self.waiting:
            request = self.waiting.peek()
            may_start = self._starts_next is None and (is_best_effort_due or not self.is_awaited)
            if request.is_best_effort and not may_start:
                self.remove(request)
                passed_over.append(request)
                continue
            has_slot = num_running + len(started) + len(deferred) < self._max_num_seqs
            hit = self._fitting(request, deferred.values()) if has_slot else None
            if hit is None:
                if request.is_best_effort or (stopped := make_way()) is None:
                    break
                self._starts_next = request
                num_running -= 1
                # Others may have waited for what it computes.
                passed_over += [stopped, *_take_best_effort(deferred)]
                continue
            self.remove(request)
            if self._kv.prefixes.is_worth_waiting(hit, self.running_key(request)):
                deferred[request] = self._kv.num_blocks_to_start(request, hit)
            else:
                self._start(request, hit, now)
                started.append(request)
        for request in passed_over:
            self.push(request)
        self._defer(deferred)
        return started

    def _fitting(self, request: BatchRequest, reserved: Iterable[NumBlocks]) -> PrefixHit | None:
        """Return what a request finds in the prefix cache; None if there is no room for the rest of it."""
        hit = self._kv.prefixes.find(request)
        needed = reduce(NumBlocks.plus, reserved, self._kv.num_blocks_to_start(request, hit))
        return hit if needed.fits(self._kv.available()) else None

    def _start(self, request: BatchRequest, hit: PrefixHit, now: float) -> None:
        self._kv.start(request, hit, self.running_key(request))
        if request.scheduled_time is None:
            request.scheduled_time = now
        self.num_aged_admissions += self.waiting.has_more_urgent(request.priority)
        request.move_to(RequestStatus.PREFILLING)

    def _defer(self, requests: Iterable[BatchRequest]) -> None:
        awaiting = {request.request_id for request in requests}
        self.num_prefix_waits += len(awaiting - self._awaiting_prefix)
        self._awaiting_prefix = awaiting
        for request in requests:
            self.push(request)


def _take_best_effort(deferred: dict[BatchRequest, NumBlocks]) -> list[BatchRequest]:
    """Remove the best-effort requests, and return them."""
    taken = [request for request in deferred if request.is_best_effort]
    for request in taken:
        del deferred[request]
    return taken
