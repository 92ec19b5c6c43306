"""The door: who is let in, and what the others are told."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Final

from app.admission.service_rate import ServiceRate
from app.api.openai.schemas.usage import Usage
from app.http.client import Client
from app.http.rejections import QueueFull, QuotaExceeded, ShuttingDown
from app.observability.request_record import RequestRecord
from batching import DeadlineExceeded, Priority, SequenceStats

# How much of the queue a class may fill: when the server is busy the less urgent work is
# refused first, and there is always room for the urgent.
_SHARES: Final = {Priority.HIGH: 1.0, Priority.NORMAL: 0.9, Priority.LOW: 0.5}

_MINUTE: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """What the server takes on at most.

    max_running: requests that run at once; those beyond wait.
    max_queued_requests, max_queued_tokens: that wait, and the tokens of their prompts.
    max_requests_per_key: unfinished requests of one client; None is as many as there is room for.
    requests_per_minute: new requests of one client; None is any number.
    drain_time: seconds that a server that is told to stop may take.
    """

    max_running: int = 8
    max_queued_requests: int = 128
    max_queued_tokens: int = 131_072
    max_requests_per_key: int | None = None
    requests_per_minute: int | None = None
    drain_time: float = 30.0

    def max_requests(self, priority: Priority) -> int:
        """Return how many unfinished requests there may be before one of this class is refused."""
        return self.max_running + int(self.max_queued_requests * _SHARES[priority])


class AdmissionController:
    """Lets requests in while there is room for their class.

    Lives in the event loop.  A request is counted from `enter` until its place is left, its
    prompt's tokens from `hold` until the model has read them.
    """

    def __init__(
        self,
        limits: AdmissionLimits,
        clock: Callable[[], float] = monotonic,
        on_end: Callable[[RequestRecord], None] = lambda _: None,
    ) -> None:
        """`on_end` hears of every request that came as far as the engine."""
        self.limits = limits
        self.clock = clock
        self.on_end = on_end
        self.is_draining = False
        self.num_requests = 0
        self.num_waiting_tokens = 0
        self._rate = ServiceRate()
        self._num_of_client: Counter[str] = Counter()
        self._allowances: dict[str, TokenBucket] = {}

    @property
    def is_full(self) -> bool:
        """True if a request of the normal class would be refused now."""
        return (
            self.num_requests >= self.limits.max_requests(Priority.NORMAL)
            or self.num_waiting_tokens >= self.limits.max_queued_tokens
        )

    def enter(self, client: Client, priority: Priority, request_id: str = "-") -> "AdmissionTicket":
        """Let a request in, which counts until it leaves its place.

        Raises:
            ShuttingDown, QueueFull: the server takes nothing more, or not of this class.
            QuotaExceeded: this client has enough in hand, or comes too often.
        """
        now = self.clock()
        if self.is_draining:
            raise ShuttingDown(max(1, min(120, round(self.limits.drain_time))))
        self._check_client(client, now)
        if self.num_requests >= self.limits.max_requests(priority):
            raise QueueFull("too many requests are waiting", self._retry_after(now))
        self._allow(client, now)
        if self.num_requests == 0:
            self._rate.begin(now)
        self.num_requests += 1
        self._num_of_client[client.name] += 1
        return AdmissionTicket(self, client, priority, request_id, now)

    def hold(self, priority: Priority, num_tokens: int) -> None:
        """Count the tokens of a request's prompts until they are read.

        Raises:
            QueueFull: they are too many now.  One request is always taken if no prompt waits.
        """
        most = self.limits.max_queued_tokens * _SHARES[priority]
        if self.num_waiting_tokens and self.num_waiting_tokens + num_tokens > most:
            raise QueueFull("too many prompt tokens are waiting", self._retry_after(self.clock()))
        self.num_waiting_tokens += num_tokens

    def leave(self, place: "AdmissionTicket") -> None:
        self.num_requests -= 1
        self.num_waiting_tokens -= place.num_waiting_tokens
        self._num_of_client[place.client.name] -= 1
        if not self._num_of_client[place.client.name]:
            del self._num_of_client[place.client.name]
        if place.was_served:
            self._rate.record_end(self.clock())

    def _check_client(self, client: Client, now: float) -> None:
        limit, own = self.limits.max_requests_per_key, self._num_of_client[client.name]
        if limit is not None and own >= limit:
            # One of the client's own has to end, and others end in between.
            seconds = self._rate.seconds_for(self.num_requests / own, now)
            raise QuotaExceeded(f"{limit} requests of this key are not finished", seconds)

    def _allow(self, client: Client, now: float) -> None:
        if (limit := self.limits.requests_per_minute) is None:
            return
        allowance = self._allowances.setdefault(client.name, TokenBucket(limit, float(limit), now))
        if (seconds := allowance.take(now)) > 0:
            raise QuotaExceeded(f"this key may send {limit} requests a minute", seconds)

    def _retry_after(self, now: float) -> int:
        num_waiting = max(1, self.num_requests - self.limits.max_running)
        return self._rate.seconds_for(num_waiting, now)


@dataclass(slots=True)
class TokenBucket:
    """A token bucket: `limit` requests at once, refilled at as many a minute."""

    limit: int
    left: float
    since: float

    def take(self, now: float) -> int:
        """Take one; return 0, or in how many seconds there is one."""
        self.left = min(self.limit, self.left + (now - self.since) * self.limit / _MINUTE)
        self.since = now
        if self.left >= 1:
            self.left -= 1
            return 0
        return -int(-(1 - self.left) * _MINUTE // self.limit)


class AdmissionTicket:
    """One request's place; leaving it never waits and may be done any number of times.

    entered: when the request came in, on the clock of the engine.
    timeout: how many seconds the request has from then on; None is as many as it takes.
    """

    def __init__(
        self,
        admission: AdmissionController,
        client: Client,
        priority: Priority,
        request_id: str,
        entered: float,
    ) -> None:
        self.client = client
        self.request_id = request_id
        self.entered = entered
        self.num_waiting_tokens = 0
        self.was_served = False
        self.timeout: float | None = None
        self.trace_headers: Mapping[str, str] = {}
        self._admission = admission
        self._priority = priority
        self._is_left = False

    def elapsed(self) -> float:
        """Return the seconds since the request came in."""
        return self._admission.clock() - self.entered

    def time_left(self) -> float | None:
        """Return the seconds that the request still has.

        Raises:
            DeadlineExceeded: none.
        """
        if self.timeout is None:
            return None
        if (left := self.timeout - self.elapsed()) <= 0:
            raise DeadlineExceeded
        return left

    def cache_salt(self, salt: str | None) -> str:
        """Return what the client's cached prefixes are found by, with a salt of its own."""
        return f"{self.client.cache_salt}:{salt}" if salt else self.client.cache_salt

    def hold(self, num_tokens: int) -> None:
        """Count the tokens of the request's prompts as waiting; see AdmissionController.hold."""
        self._admission.hold(self._priority, num_tokens)
        self.num_waiting_tokens += num_tokens
        self.was_served = True

    def read(self, num_tokens: int) -> None:
        """Take that the model has read so many of the waiting tokens."""
        self._admission.num_waiting_tokens -= num_tokens
        self.num_waiting_tokens -= num_tokens

    def end(
        self, completion_id: str, answers: Sequence[SequenceStats], usage: Usage, ending: str
    ) -> None:
        """Leave, and tell what became of the request."""
        self.leave()
        self._admission.on_end(
            RequestRecord(
                completion_id=completion_id,
                request_id=self.request_id,
                client_name=self.client.name,
                entered=self.entered,
                elapsed=self.elapsed(),
                answers=answers,
                usage=usage,
                ending=ending,
                trace_headers=self.trace_headers,
            )
        )

    def leave(self) -> None:
        if not self._is_left:
            self._is_left = True
            self._admission.leave(self)
