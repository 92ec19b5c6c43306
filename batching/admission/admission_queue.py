"""Admission into the batch: which waiting requests start, and when."""

from collections.abc import Callable, Iterable, Sequence
from functools import reduce

from batching.adapters.adapter import Adapter
from batching.admission.urgency import Urgency
from batching.config import SchedulerConfig
from batching.kv_cache.manager import KVCacheManager, NumBlocks
from batching.kv_cache.prefix_lookup import PrefixHit
from batching.priority_queue import PriorityQueueWithAging, RunningKey
from batching.request import BatchRequest, RequestStatus


class AdmissionQueue:
    """The waiting requests, admitted in the order of the aging queue.

    No request overtakes one that has to wait for room, unless it or one behind it is urgent: see `Urgency`.

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
        # How many requests may start in the queue's order though others are urgent.
        self._num_turns = 0
        self._config = config
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

    def startable(self, running: Sequence[BatchRequest], now: float) -> list[BatchRequest]:
        """Return the first interactive request that waits, if it may start now.

        running: the admitted requests.
        """
        if not self.is_awaited:
            return []
        urgency = Urgency(self.waiting, self._config.max_urgent_wait, now)
        waiting = (r for r in self.waiting if not r.is_best_effort)
        key = self.running_key if urgency.has_urgent else self.waiting.key
        request = min(waiting, key=key)
        stopped = [r for r in running if urgency.stops(r)]
        kept = [r for r in running if not urgency.stops(r)]
        batch = _Admission(kept, self._config.max_num_seqs)
        if batch.num_slots <= 0 or not self._has_adapter_slot(request, batch, stopped):
            return []
        # Those that make way have blocks, too.
        return [request] if stopped or self._fitting(request, batch) is not None else []

    def push(self, request: BatchRequest) -> None:
        self.waiting.push(request)
        self._num_best_effort += request.is_best_effort

    def remove(self, request: BatchRequest) -> None:
        self.waiting.remove(request)
        self._num_best_effort -= request.is_best_effort

    def running_key(self, request: BatchRequest) -> RunningKey:
        """Return the sort key of an admitted request: by class, then by due time."""
        return RunningKey(request.rank, *self.waiting.key(request))

    def leave_room(self, request: BatchRequest) -> None:
        """Record that an admitted request has ended."""
        if not self.waiting.has_more_urgent(request.priority):
            self._num_turns += 1

    def admit(
        self,
        running: Sequence[BatchRequest],
        now: float,
        stop: Callable[[BatchRequest], None],
        *,
        is_best_effort_due: bool,
    ) -> list[BatchRequest]:
        """Start waiting requests in order, until there is no sequence slot, not enough blocks, or no slot for an adapter.

        A request whose prefix another request is computing right now waits for that: it keeps its position,
        and a sequence slot and the blocks that it will need stay reserved for it.

        running: the admitted requests, in the order of service.
        stop: removes one of them, for a more urgent one; it is queued again after the others have started.
        is_best_effort_due: best-effort requests take part in this step; otherwise they start only if no
            other request waits, since the next step might stop them.
        """
        urgency = Urgency(self.waiting, self._config.max_urgent_wait, now)
        if not urgency.has_urgent:
            self._num_turns = 0
        batch = _Admission(running, self._config.max_num_seqs)
        while self.waiting:
            request = self.waiting.peek()
            is_behind = urgency.passes(request)
            has_turn = is_best_effort_due if request.is_best_effort else self._num_turns > 0
            hit = self._fitting(request, batch) if has_turn or not is_behind else None
            if hit is not None:
                self._take(request, hit, batch, now)
                if urgency.settle(request):
                    self._push(batch.take_passed_over())
            elif is_behind:
                self.remove(request)
                batch.passed_over.append(request)
            elif not self._make_way(request, batch, urgency, stop):
                break
        self._push(batch.take_passed_over())
        self._push(batch.stopped)
        self._defer(batch.deferred)
        return batch.started

    def _fitting(self, request: BatchRequest, batch: "_Admission") -> PrefixHit | None:
        """Return what a request finds in the prefix cache; None if there is no room for the rest of it."""
        if batch.num_slots <= 0:
            return None
        if not self._has_adapter_slot(request, batch):
            return None
        hit = self._kv.prefixes.find(request)
        needed = batch.num_reserved.plus(self._kv.num_blocks_to_start(request, hit))
        return hit if needed.fits(self._kv.available()) else None

    def _make_way(
        self,
        request: BatchRequest,
        batch: "_Admission",
        urgency: Urgency,
        stop: Callable[[BatchRequest], None],
    ) -> bool:
        """Stop as few running requests as make room for a waiting one; return whether there is room now."""
        victims = [r for r in reversed(batch.running) if urgency.stops(r)]
        if not victims:
            return False
        hit = self._kv.prefixes.find(request)
        needed = batch.num_reserved.plus(self._kv.num_blocks_to_start(request, hit))

        def makes_room(stopped: Sequence[BatchRequest]) -> bool:
            if len(stopped) + batch.num_slots <= 0:
                return False
            if not self._has_adapter_slot(request, batch, stopped):
                return False
            freed = self._kv.num_freed(stopped, request, hit)
            return needed.fits(self._kv.available().plus(freed))

        nums = range(1, len(victims) + 1)
        stopped = next((victims[:num] for num in nums if makes_room(victims[:num])), [])
        if stopped and not self._has_adapter_slot(request, batch):
            # Only those that have one adapter need go, wherever they are among the others.
            for victim in reversed(stopped):
                fewer = [r for r in stopped if r is not victim]
                stopped = fewer if makes_room(fewer) else stopped
        for victim in stopped:
            stop(victim)
        batch.make_way(stopped)
        return bool(stopped)

    def _has_adapter_slot(
        self, request: BatchRequest, batch: "_Admission", leaving: Iterable[BatchRequest] = ()
    ) -> bool:
        """Return whether there is a slot for a request's adapter, if admitted requests left."""
        adapters = [r.spec.adapter for r in leaving]
        return self._kv.adapters.has_room(request.spec.adapter, batch.reserved_adapters, adapters)

    def _take(self, request: BatchRequest, hit: PrefixHit, batch: "_Admission", now: float) -> None:
        """Start a request that has room, or let it wait for its prefix."""
        self.remove(request)
        if self._kv.prefixes.is_worth_waiting(hit, self.running_key(request)):
            batch.deferred[request] = self._kv.num_blocks_to_start(request, hit)
            return
        self._start(request, hit, now)
        batch.started.append(request)
        self._num_turns = max(0, self._num_turns - 1)

    def _start(self, request: BatchRequest, hit: PrefixHit, now: float) -> None:
        self._kv.start(request, hit, self.running_key(request))
        request.admitted_time = now
        if request.scheduled_time is None:
            request.scheduled_time = now
        self.num_aged_admissions += self.waiting.has_more_urgent(request.priority)
        request.move_to(RequestStatus.PREFILLING)

    def _defer(self, requests: Iterable[BatchRequest]) -> None:
        awaiting = {request.request_id for request in requests}
        self.num_prefix_waits += len(awaiting - self._awaiting_prefix)
        self._awaiting_prefix = awaiting
        self._push(requests)

    def _push(self, requests: Iterable[BatchRequest]) -> None:
        for request in requests:
            self.push(request)


class _Admission:
    """What becomes of the waiting requests before one step.

    started: in the order in which they started.
    deferred: those that wait for a prefix, with the blocks that are reserved for them.
    stopped: those that made way.  They are queued again afterwards.
    """

    def __init__(self, running: Sequence[BatchRequest], max_num_seqs: int) -> None:
        """`running` are the admitted requests; it changes as they are stopped."""
        self.running = running
        self.started: list[BatchRequest] = []
        self.deferred: dict[BatchRequest, NumBlocks] = {}
        self.stopped: list[BatchRequest] = []
        self.passed_over: list[BatchRequest] = []
        self._max_num_seqs = max_num_seqs

    @property
    def num_slots(self) -> int:
        """How many more requests may start."""
        return self._max_num_seqs - len(self.running) - len(self.started) - len(self.deferred)

    @property
    def num_reserved(self) -> NumBlocks:
        return reduce(NumBlocks.plus, self.deferred.values(), NumBlocks(0))

    @property
    def reserved_adapters(self) -> list[Adapter | None]:
        """The adapters of requests that wait for a prefix."""
        return [request.spec.adapter for request in self.deferred]

    def make_way(self, stopped: Iterable[BatchRequest]) -> None:
        """Record that requests were stopped for another one."""
        # Best-effort requests may have waited for what these compute.
        waited = [r for r in self.deferred if r.is_best_effort]
        for each in waited:
            del self.deferred[each]
        self.stopped += [*stopped, *waited]

    def take_passed_over(self) -> list[BatchRequest]:
        """Return the requests that were passed over, each once."""
        passed_over, self.passed_over = self.passed_over, []
        return passed_over
