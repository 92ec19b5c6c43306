"""Admission control: which requests are accepted, and when rejected ones may be sent again."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Final, Self

from app.admission.service_rate import ServiceRate
from app.http.client import Client
from app.http.errors.rejections import QueueFull, QuotaExceeded, ShuttingDown
from batching import Priority

# How much of the queue a priority class may fill: a busy server rejects the less urgent
# requests first and always has room for urgent ones.
QUEUE_SHARE: Final = {Priority.HIGH: 1.0, Priority.NORMAL: 0.9, Priority.LOW: 0.5}

_MINUTE: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """The limits of admission control.

    max_num_seqs: the most requests that run at once; further ones wait.
    max_queued_requests, max_queued_tokens: the most waiting requests, and tokens of their prompts.
    max_requests_per_key: the most unfinished requests of one API key; None is no limit.
    requests_per_minute: the most new requests of one API key in a minute; None is no limit.
    shutdown_timeout: the most seconds that a shutdown takes, for its `Retry-After`.
    """

    max_num_seqs: int = 8
    max_queued_requests: int = 128
    max_queued_tokens: int = 131_072
    max_requests_per_key: int | None = None
    requests_per_minute: int | None = None
    shutdown_timeout: float = 30.0

    def max_requests(self, priority: Priority) -> int:
        """Return the number of unfinished requests at which a request of this priority is rejected."""
        return self.max_num_seqs + int(self.max_queued_requests * QUEUE_SHARE[priority])


class AdmissionController:
    """Accepts requests while there is room for their priority class, and rejects the others.

    It lives on the event loop, so it needs no lock.  A request counts from `admit` until its ticket is
    released; its prompt tokens count from `reserve_tokens` until they are prefilled.
    """

    def __init__(self, limits: AdmissionLimits, clock: Callable[[], float] = monotonic) -> None:
        self.limits = limits
        self.clock = clock
        self.is_draining = False
        self.num_requests = 0
        self.num_waiting_tokens = 0
        self._num_batch_requests = 0
        self._last_live = -math.inf
        self._rate = ServiceRate(limits.max_num_seqs)
        self._num_of_client: Counter[str] = Counter()
        self._buckets: dict[str, TokenBucket] = {}

    @property
    def is_full(self) -> bool:
        """True if a request of normal priority would be rejected now."""
        return (
            self.num_requests >= self.limits.max_requests(Priority.NORMAL)
            or self.num_waiting_tokens >= self.limits.max_queued_tokens
        )

    def seconds_since_live(self) -> float:
        """Return the seconds since a request other than a line of a batch was last in flight."""
        if self.num_requests > self._num_batch_requests:
            return 0.0
        return self.clock() - self._last_live

    def admit(self, client: Client, priority: Priority) -> "AdmissionTicket":
        """Admit a request; it counts until its ticket is released.

        Lines of batches always have low priority, and are not counted against the limits of their key.

        Raises:
            ShuttingDown: the server accepts no more requests.
            QueueFull: too many requests of this priority or a higher one are in flight.
            QuotaExceeded: the client has reached its limit of requests in flight or per minute.
        """
        now = self.clock()
        if self.is_draining:
            raise ShuttingDown(max(1, min(120, round(self.limits.shutdown_timeout))))
        if client.is_batch:
            priority = Priority.LOW
        else:
            self._check_client(client, now)
        if self.num_requests >= self.limits.max_requests(priority):
            raise QueueFull("too many requests are waiting", self._retry_after(now))
        if not client.is_batch:
            self._check_rate_limit(client, now)
        if self.num_requests == 0:
            self._rate.begin(now)
        self.num_requests += 1
        if client.is_batch:
            self._num_batch_requests += 1
        else:
            self._num_of_client[client.name] += 1
        return AdmissionTicket(self, client, priority)

    def reserve_tokens(self, priority: Priority, num_tokens: int) -> None:
        """Count the tokens of a request's prompts until they are prefilled.

        Raises:
            QueueFull: too many prompt tokens are waiting; if none are, a request of any size is accepted.
        """
        most = self.limits.max_queued_tokens * QUEUE_SHARE[priority]
        if self.num_waiting_tokens and self.num_waiting_tokens + num_tokens > most:
            raise QueueFull("too many prompt tokens are waiting", self._retry_after(self.clock()))
        self.num_waiting_tokens += num_tokens

    def release(self, ticket: "AdmissionTicket") -> None:
        now = self.clock()
        self.num_requests -= 1
        self.num_waiting_tokens -= ticket.num_waiting_tokens
        if ticket.client.is_batch:
            self._num_batch_requests -= 1
        else:
            self._last_live = now
            self._release_client(ticket.client)
        if ticket.reached_engine:
            self._rate.record_end(now)

    def _release_client(self, client: Client) -> None:
        self._num_of_client[client.name] -= 1
        if not self._num_of_client[client.name]:
            del self._num_of_client[client.name]

    def _check_client(self, client: Client, now: float) -> None:
        limit, own = self.limits.max_requests_per_key, self._num_of_client[client.name]
        if limit is not None and own >= limit:
            # One of the client's own requests has to end, and others end in between.
            seconds = self._rate.seconds_for(self.num_requests / own, now)
            raise QuotaExceeded(f"this API key has {limit} requests in flight, its limit", seconds)

    def _check_rate_limit(self, client: Client, now: float) -> None:
        if (limit := self.limits.requests_per_minute) is None:
            return
        bucket = self._buckets.setdefault(client.name, TokenBucket(limit, float(limit), now))
        if (seconds := bucket.take(now)) > 0:
            raise QuotaExceeded(f"this API key may send {limit} requests a minute", seconds)

    def _retry_after(self, now: float) -> int:
        num_waiting = max(1, self.num_requests - self.limits.max_num_seqs)
        return self._rate.seconds_for(num_waiting, now)


@dataclass(slots=True)
class TokenBucket:
    """A token bucket that holds `limit` requests and is refilled at `limit` requests a minute.

    left: how many requests it held at the time `since`.
    """

    limit: int
    left: float
    since: float

    def take(self, now: float) -> int:
        """Take one request; return 0, or the seconds until the next one is available."""
        self.left = min(self.limit, self.left + (now - self.since) * self.limit / _MINUTE)
        self.since = now
        if self.left >= 1:
            self.left -= 1
            return 0
        return -int(-(1 - self.left) * _MINUTE // self.limit)


class AdmissionTicket:
    """One admitted request; `release`, also the end of a `with` block, never waits and may be repeated.

    num_waiting_tokens: prompt tokens that are not prefilled yet.
    priority: the priority class in the engine's queue.
    is_best_effort: the request is a line of a batch, which runs when the engine has nothing else to do.
    reached_engine: its prompt tokens were reserved, so that its end counts for the service rate.
    """

    def __init__(self, controller: AdmissionController, client: Client, priority: Priority) -> None:
        self.client = client
        self.num_waiting_tokens = 0
        self.reached_engine = False
        self.priority = priority
        self.is_best_effort = client.is_batch
        self._controller = controller
        self._is_released = False

    def reserve_tokens(self, num_tokens: int) -> None:
        """Count the request's prompt tokens as waiting; see AdmissionController.reserve_tokens."""
        self._controller.reserve_tokens(self.priority, num_tokens)
        self.num_waiting_tokens += num_tokens
        self.reached_engine = True

    def release_tokens(self, num_tokens: int) -> None:
        """Count prompt tokens as prefilled, so that they no longer wait."""
        self._controller.num_waiting_tokens -= num_tokens
        self.num_waiting_tokens -= num_tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> bool:
        """Give the place to others; return False if that was done before."""
        if self._is_released:
            return False
        self._is_released = True
        self._controller.release(self)
        return True
