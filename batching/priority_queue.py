"""The waiting line: priorities that age, on a heap that is never sorted again."""

import heapq
from collections.abc import Iterator
from enum import IntEnum
from typing import Generic, NamedTuple, Protocol, TypeVar


class Priority(IntEnum):
    """How urgent a request is; the smaller the sooner."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


class Waiting(Protocol):
    """What the queue needs to know of an item; none of it may change while it waits."""

    @property
    def request_id(self) -> int: ...
    @property
    def priority(self) -> Priority: ...
    @property
    def arrival_time(self) -> float: ...


class QueueKey(NamedTuple):
    """The order of service: earlier due time first, then the order of arrival."""

    due_time: float
    request_id: int


T = TypeVar("T", bound=Waiting)


class PriorityQueueWithAging(Generic[T]):
    """Serves by effective priority = base - age * rate, smallest first.

    All waiters age alike, so the order of two of them never changes: at any time `t`

        priority - (t - arrival) * rate   orders as   arrival + priority / rate

    and that *due time* is a constant, so a heap holds and nothing is re-sorted.  It gives
    the bound tests/batching/test_priority_queue.py checks: a request of priority p is never
    overtaken by one that arrives more than p / rate seconds after it.

    An item that comes back (preempted) keeps its arrival, hence its place.  Removal is lazy:
    the heap may hold keys of items that have left; `_items` says who is here.
    """

    def __init__(self, aging_rate: float = 0.1) -> None:
        if not aging_rate > 0:
            raise ValueError(f"aging_rate must be above 0, not {aging_rate}")
        self.aging_rate = aging_rate
        self._heap: list[QueueKey] = []
        self._items: dict[int, T] = {}
        self._num_of_class = dict.fromkeys(Priority, 0)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        """Yield the waiters in order of service; for tests and statistics, O(n log n)."""
        return iter(sorted(self._items.values(), key=self.key))

    def key(self, item: T) -> QueueKey:
        return QueueKey(item.arrival_time + item.priority / self.aging_rate, item.request_id)

    def effective_priority(self, item: T, now: float) -> float:
        """Return base - age * rate; what the order means, for people and for tests."""
        return item.priority - (now - item.arrival_time) * self.aging_rate

    def has_more_urgent(self, priority: Priority) -> bool:
        """True if somebody of a more urgent class waits."""
        return any(self._num_of_class[other] for other in Priority if other < priority)

    def push(self, item: T) -> None:
        """Queue an item in O(log n)."""
        assert item.request_id not in self._items, "a request waits once"
        self._items[item.request_id] = item
        self._num_of_class[item.priority] += 1
        heapq.heappush(self._heap, self.key(item))

    def pop(self) -> T:
        """Take the most urgent item; IndexError when nobody waits."""
        item = self.peek()
        heapq.heappop(self._heap)
        del self._items[item.request_id]
        self._num_of_class[item.priority] -= 1
        return item

    def peek(self) -> T:
        """Look at the most urgent item; IndexError when nobody waits."""
        while self._heap[0].request_id not in self._items:
            heapq.heappop(self._heap)
        return self._items[self._heap[0].request_id]

    def remove(self, item: T) -> None:
        """Take an item out of the middle; its key is dropped when it comes to the top."""
        del self._items[item.request_id]
        self._num_of_class[item.priority] -= 1
        if not self._items:
            self._heap.clear()
