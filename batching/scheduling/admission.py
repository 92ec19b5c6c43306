"""Which waiting requests start, and when."""

from collections.abc import Callable, Iterable
from functools import reduce
from math import inf

from batching.config import SchedulerConfig
from batching.kv_cache.manager import KVCacheManager, NumBlocks
from batching.kv_cache.prefix_lookup import PrefixHit
from batching.priority_queue import PriorityQueueWithAging, QueueKey
from batching.request import BatchRequest, RequestStatus


class AdmissionQueue:
    """Waiting requests, admitted in the aged order; none overtakes one that must wait for room.

    Best-effort requests make way for others: if one of these is first and finds no room, running ones
    return to the queue, and none starts until it has started.

    num_aged_admissions: requests admitted before a waiting one of a more urgent class.
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
        """How many of the waiting requests were waiting for a prefix at the last plan."""
        return min(len(self._awaiting_prefix), len(self.waiting))

    @property
    def is_awaited(self) -> bool:
        """True if a request waits for which a best-effort one would make way."""
        return self.num_others > 0

    @property
    def num_others(self) -> int:
        """How many of the waiting requests are not best-effort ones."""
        return len(self.waiting) - self._num_best_effort

    def push(self, request: BatchRequest) -> None:
        self.waiting.push(request)
        self._num_best_effort += request.is_best_effort

    def remove(self, request: BatchRequest) -> None:
        self.waiting.remove(request)
        self._num_best_effort -= request.is_best_effort
        if request is self._starts_next:
            self._starts_next = None

    def running_key(self, request: BatchRequest) -> QueueKey:
        """Return the order in which admitted requests are served: best-effort ones come last."""
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
        """Start requests in the queue's order, until no sequence slot or too few blocks are left.

        A request whose prefix is being computed right now waits for it: it keeps its position,
        and a sequence slot and the blocks it will need are reserved for it.  `make_way` stops a
        best-effort request and returns it, if one runs; it is queued again when the others have started.
        While others wait, best-effort requests start only if they are due to take part in this step: the
        next one may stop them.
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
                waiting = [each for each in deferred if each.is_best_effort]
                passed_over += [stopped, *waiting]
                deferred = {each: n for each, n in deferred.items() if each not in waiting}
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
        """Return what a request finds in the prefix cache; None if there is no room for the rest."""
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
