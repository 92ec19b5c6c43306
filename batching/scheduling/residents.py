"""The sequences that the executor knows, and those that begin and end with the next plan."""

from typing import NamedTuple

from batching.request import BatchRequest, RequestStatus
from batching.steps.step_plan import StartedSequence


class Changes(NamedTuple):
    """The changes since the last plan; see `StepPlan`."""

    started: tuple[StartedSequence, ...]
    ended: tuple[int, ...]
    preempted: tuple[int, ...]


class Residents:
    """Follows which sequences the executor knows, from their first slice on until they leave the batch.

    A sequence that is preempted leaves as one that has ended does, and starts again with its tokens.
    """

    def __init__(self) -> None:
        self._requests: dict[int, BatchRequest] = {}
        self._started: list[StartedSequence] = []
        self._ended: list[int] = []
        self._preempted: list[int] = []

    def get(self, sequence_id: int) -> BatchRequest | None:
        """Return the request with this id, or None if it has left while its step was in flight."""
        return self._requests.get(sequence_id)

    def start(self, request: BatchRequest) -> None:
        """Tell the executor of a request, unless it knows it."""
        if request.request_id not in self._requests:
            self._requests[request.request_id] = request
            self._started.append(request.started())

    def end(self, request: BatchRequest) -> None:
        """Let the executor forget a request, if it knows it; the request's status is the new one."""
        if self._requests.pop(request.request_id, None) is not None:
            is_over = request.status is not RequestStatus.WAITING
            (self._ended if is_over else self._preempted).append(request.request_id)

    def take_changes(self) -> Changes:
        """Return the changes, each once."""
        changes = Changes(tuple(self._started), tuple(self._ended), tuple(self._preempted))
        self._started, self._ended, self._preempted = [], [], []
        return changes

    def forget(self) -> None:
        """Record that the executor has forgotten all sequences."""
        self._requests.clear()
        self.take_changes()
