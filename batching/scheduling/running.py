"""The batch: the admitted requests, in the order in which they are served."""

from bisect import bisect_left, insort

from batching.kv_cache.manager import KVCacheManager
from batching.request import BatchRequest, RequestStatus
from batching.scheduling.admission import AdmissionQueue
from batching.scheduling.residents import Residents


class RunningRequests:
    """The admitted requests; a request that leaves gives its blocks back.

    requests: the one that is due first in front, best-effort requests behind all others.
    num_preemptions: how often a request had to leave before its end to make room for another one.
    """

    def __init__(self, kv: KVCacheManager, admission: AdmissionQueue, residents: Residents) -> None:
        self.requests: list[BatchRequest] = []
        self.num_preemptions = 0
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
        key = self._admission.running_key(request)
        del self.requests[bisect_left(self.requests, key, key=self._admission.running_key)]
        self._kv.release(request, key)
        self._residents.end(request)

    def preempt(self, request: BatchRequest) -> None:
        """Move a request back to the queue."""
        self._stop(request)
        self._admission.push(request)

    def make_way(self) -> BatchRequest | None:
        """Stop the best-effort request that is due last and return it; the caller queues it again."""
        if not self.has_best_effort:
            return None
        victim = self.requests[-1]
        self._stop(victim)
        return victim

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
