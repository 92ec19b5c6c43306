"""The batch: the admitted requests, in the order in which they are served."""

from bisect import bisect_left, insort

from batching.admission.admission_queue import AdmissionQueue
from batching.kv_cache.manager import KVCacheManager
from batching.priority_queue import QueueKey
from batching.request import BatchRequest, RequestStatus
from batching.scheduling.residents import Residents


class RunningRequests:
    """The admitted requests; a request that leaves gives its blocks back.

    requests: higher classes in front, best-effort requests behind all others; of a class, the one that
        is due first.
    num_preemptions: how often a request had to leave before its end to make room for another one.
    num_urgent_preemptions: how often an interactive one made way for a waiting request of a higher class.
    """

    def __init__(self, kv: KVCacheManager, admission: AdmissionQueue, residents: Residents) -> None:
        self.requests: list[BatchRequest] = []
        self.num_preemptions = 0
        self.num_urgent_preemptions = 0
        self._kv = kv
        self._admission = admission
        self._residents = residents

    @property
    def has_best_effort(self) -> bool:
        return bool(self.requests) and self.requests[-1].is_best_effort

    @property
    def num_best_effort(self) -> int:
        # They are the last ones.
        for num, request in enumerate(reversed(self.requests)):
            if not request.is_best_effort:
                return num
        return len(self.requests)

    def due_key(self, request: BatchRequest) -> QueueKey:
        """Return the sort key of due times, whatever the class."""
        return self._admission.waiting.key(request)

    def split(self) -> tuple[list[BatchRequest], list[BatchRequest]]:
        """Return the requests of interactive clients, and the best-effort requests."""
        num_others = len(self.requests) - self.num_best_effort
        return self.requests[:num_others], self.requests[num_others:]

    def join(self, request: BatchRequest) -> None:
        """Add an admitted request, at its place in the order."""
        insort(self.requests, request, key=self._admission.running_key)

    def leave(self, request: BatchRequest, status: RequestStatus) -> None:
        """Remove a request, which then has this status and no blocks."""
        request.move_to(status)
        if request.has_ended:
            self._admission.leave_room(request)
        key = self._admission.running_key(request)
        del self.requests[bisect_left(self.requests, key, key=self._admission.running_key)]
        self._kv.release(request, key)
        self._residents.end(request)

    def preempt(self, request: BatchRequest) -> None:
        """Move a request back to the queue."""
        self._stop(request)
        self._admission.push(request)

    def make_way(self, request: BatchRequest) -> None:
        """Stop a request for one of a higher class; the caller queues it again."""
        self._stop(request)
        self.num_urgent_preemptions += not request.is_best_effort

    def requeue(self, request: BatchRequest) -> None:
        """Move a request for which there is no sequence slot to the queue."""
        self._suspend(request)
        self._admission.push(request)

    def _stop(self, request: BatchRequest) -> None:
        self._suspend(request)
        request.num_preemptions += 1
        self.num_preemptions += 1

    def _suspend(self, request: BatchRequest) -> None:
        """Free a request's blocks; it keeps its tokens and its position in the queue."""
        self.leave(request, RequestStatus.WAITING)
        if not request.num_output_tokens:
            request.prompt_logprobs.clear()
