"""An admitted request, from its admission to its log record."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from time import monotonic

from app.admission.controller import AdmissionTicket
from app.admission.patience import after_departures
from app.observability.request_record import RequestRecord, TokenUsage
from batching import PINNED, DeadlineExceeded, SequenceSpec, SequenceStats


@dataclass(frozen=True, slots=True)
class Deadline:
    """The time limit of a request.

    arrival: when the request arrived, in seconds on the engine's clock, `monotonic`.
    timeout: in seconds; None is no limit.
    """

    arrival: float
    timeout: float | None = None
    clock: Callable[[], float] = monotonic

    def elapsed(self) -> float:
        return self.clock() - self.arrival

    def time_left(self) -> float | None:
        """Return the seconds that are left; None is no limit.

        Raises:
            DeadlineExceeded: none is left.
        """
        if self.timeout is None:
            return None
        if (left := self.timeout - self.elapsed()) <= 0:
            raise DeadlineExceeded
        return left


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedRequest:
    """A request from its admission to its end.

    held: is called when the HTTP request ends, however it ends: here belongs all that must not
        outlive it.
    trace_headers: the W3C Trace Context headers of the caller.
    on_finish: called with the record of every request that reached the engine.
    """

    ticket: AdmissionTicket
    deadline: Deadline
    held: ExitStack = field(default_factory=ExitStack)
    request_id: str = "-"
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    on_finish: Callable[[RequestRecord], None] = lambda _: None

    def cache_salt(self, salt: str) -> str:
        """Return the salt of the request's cached prefixes: the client's, and its own if any."""
        client_salt = self.ticket.client.cache_salt
        return f"{client_salt}:{salt}" if salt else client_salt

    def applied_to(self, spec: SequenceSpec) -> SequenceSpec:
        """Return a spec with what this request adds: its priority, its client's salt, the time that is left."""
        retention = PINNED if self.ticket.client.pins else spec.retention
        return replace(
            spec,
            priority=self.ticket.priority,
            is_best_effort=self.ticket.is_best_effort,
            cache_salt=self.cache_salt(spec.cache_salt),
            # Of no other client, whatever it calls its sessions, also where all share a salt.
            retention=retention._replace(client=self.ticket.client.name),
            time_limit=self.deadline.time_left(),
        )

    async def reserve_tokens(self, num_tokens: int) -> None:
        """Count prompt tokens as waiting; see `AdmissionController.reserve_tokens`.

        Raises:
            QueueFull: too many prompt tokens wait.
        """
        await after_departures(lambda: self.ticket.reserve_tokens(num_tokens))

    def finish(
        self,
        *,
        completion_id: str,
        model_id: str,
        stats: Sequence[SequenceStats],
        usage: TokenUsage,
        outcome: str,
    ) -> None:
        """Release the ticket and report the request's record, once."""
        if not self.ticket.release():
            return
        self.on_finish(
            RequestRecord(
                completion_id=completion_id,
                model_id=model_id,
                request_id=self.request_id,
                client_name=self.ticket.client.name,
                arrival=self.deadline.arrival,
                elapsed=self.deadline.elapsed(),
                sequences=stats,
                usage=usage,
                outcome=outcome,
                trace_headers=self.trace_headers,
            )
        )
