"""Which requests make way for one that waits, and for how long a request waits at most."""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from batching.priority_queue import Priority
from batching.request import BatchRequest

# Seconds that an interactive request runs before it may be stopped for a more urgent one: long enough
# that it advances by far more than the block that it computes again.
MIN_RUN: Final = 2.0


class Urgency:
    """The requests that have waited too long when a step is planned, and what makes way for them.

    A class is urgent while a request of it has waited for `max_wait` seconds.  Then requests of lower
    classes make way for it, and for those that are before it in the queue:

    - They are stopped, the lowest class first and of a class the one that is due last, as few as make
      room; none if all of them together would not.  They keep their places in the queue, and begin again
      behind their cached blocks.  None is stopped that has run for less than `MIN_RUN` seconds.
    - Waiting ones are passed over.

    Best-effort requests are the lowest class of all.  They make way for any interactive request that
    waits, at once.

    **What lower classes keep.**  A request that ends gives the queue a turn, unless one of a higher class
    waits: one request is then admitted in the queue's order, whatever class is urgent.  So urgent requests
    pass lower classes only in room that lower classes leave or make, and aging decides on all other room.
    An admitted request runs for `MIN_RUN` seconds at least (blocks that run out aside), in which the
    prompt that is due first has a quarter of a step's prompt tokens.  However many higher ones wait, each
    of them that ends is thus followed by one of a lower class that has aged, for `MIN_RUN` seconds or to
    its end.  Only a request that needs more blocks than higher classes ever leave waits for these.

    **The bound.**  Of a request of class c, let S be the requests of class c and higher, itself included,
    that are there at any time until it is admitted.  If S are no more than `max_num_seqs`, and fit
    into the KV cache and the slots of adapters together with as many others as those of S that have left, it
    is admitted within

        max_urgent_wait + MIN_RUN + 2 steps.

    For suppose that it still waits.  A request of a lower class that runs now was admitted less than
    `MIN_RUN` seconds ago, while class c was urgent, in a turn that one of S gave when it ended.  All
    others that run are of S themselves.  So with the one that waits S are more than `max_num_seqs`.

    Before its first token the prompts of S are read, and each step gives half of its prompt tokens to the
    first one of the highest class; while it does, a still higher class may stop it, once in `MIN_RUN`
    seconds.  The lowest class has no such bound: aging says whom it waits for.
    (tests/batching/scheduling/test_urgent_waits.py)
    """

    def __init__(self, waiting: Iterable[BatchRequest], max_wait: float, now: float) -> None:
        interactive = [r for r in waiting if not r.is_best_effort]
        self._max_wait = max_wait
        self._now = now
        self._present = Counter(r.rank for r in interactive)
        self._urgent = Counter(r.rank for r in interactive if self._is_urgent(r))

    @property
    def has_urgent(self) -> bool:
        return any(self._urgent.values())

    def settle(self, request: BatchRequest) -> bool:
        """Count a request no longer, since it has room; return whether others make way for a class less."""
        if request.is_best_effort:
            return False
        counts = [self._present, self._urgent] if self._is_urgent(request) else [self._present]
        for count in counts:
            count[request.rank] -= 1
        return any(not count[request.rank] for count in counts)

    def passes(self, request: BatchRequest) -> bool:
        """Return whether a waiting request is passed over for others."""
        counts = self._present if request.is_best_effort else self._urgent
        return any(num and rank < request.rank for rank, num in counts.items())

    def stops(self, request: BatchRequest) -> bool:
        """Return whether a running request may be stopped for others."""
        has_run = request.is_best_effort or self._now - request.admitted_time >= MIN_RUN
        return has_run and self.passes(request)

    def _is_urgent(self, request: BatchRequest) -> bool:
        # Nothing but best-effort requests is below the lowest class, and those never let it wait.
        has_lower = request.rank < max(Priority)
        return has_lower and self._now - request.arrival_time >= self._max_wait
