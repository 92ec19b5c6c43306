"""The queue of waiting requests: priorities that age, on a heap that is never re-sorted."""

import heapq
from collections.abc import Iterator
from enum import IntEnum
from typing import Generic, NamedTuple, Protocol, TypeVar


class Priority(IntEnum):
    """How urgent a request is; smaller is more urgent."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


class Waiting(Protocol):
    """The attributes that the queue reads of an item; they must not change while the item waits."""

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


class RunningKey(NamedTuple):
    """The order of service in the batch: higher classes (of smaller rank) first, then as in the queue."""

    rank: int
    due_time: float
    request_id: int


T = TypeVar("T", bound=Waiting)


class PriorityQueueWithAging(Generic[T]):
    """Serves by effective priority = class - age * rate, smallest first, so that no item starves.

    All waiting items age at the same rate, so the order of two of them never changes: at any time `t`

        class - (t - arrival) * rate   orders as   arrival + class / rate

    The right side, the *due time*, is a constant, so a heap suffices and nothing is ever re-sorted.  It
    follows that an item of class p is never overtaken by one that arrives more than p / rate seconds
    later (checked by tests/batching/test_priority_queue.py).

    A preempted item keeps its arrival time and hence its position.  Removal is lazy: the heap may contain
    the keys of items that have left; `_items` has those that wait.

    aging_rate: classes per second; above 0.
    """

    def __init__(self, aging_rate: float) -> None:
        if not aging_rate > 0:
            raise ValueError(f"aging_rate must be above 0, not {aging_rate}")
        self.aging_rate = aging_rate
        self._heap: list[QueueKey] = []
        self._items: dict[int, T] = {}
        self._num_of_class = dict.fromkeys(Priority, 0)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        """Return the items in no particular order."""
        return iter(self._items.values())

    def first(self, limit: int) -> list[T]:
        """Return the first items in order of service, without sorting the others."""
        return heapq.nsmallest(limit, self._items.values(), key=self.key)

    def key(self, item: T) -> QueueKey:
        """Return the constant sort key of an item."""
        return QueueKey(item.arrival_time + item.priority / self.aging_rate, item.request_id)

    def effective_priority(self, item: T, now: float) -> float:
        """Return class - age * rate at the time `now`; only snapshots and tests need it."""
        return item.priority - (now - item.arrival_time) * self.aging_rate

    def has_more_urgent(self, priority: Priority) -> bool:
        """True if an item of a more urgent class waits."""
        return any(self._num_of_class[other] for other in Priority if other < priority)

    def push(self, item: T) -> None:
        """Queue an item in O(log n)."""
        assert item.request_id not in self._items, "a request waits once"
        self._items[item.request_id] = item
        self._num_of_class[item.priority] += 1
        heapq.heappush(self._heap, self.key(item))

    def peek(self) -> T:
        """Return the most urgent item.

        Raises:
            IndexError: the queue is empty.
        """
        while self._heap[0].request_id not in self._items:
            heapq.heappop(self._heap)
        return self._items[self._heap[0].request_id]

    def remove(self, item: T) -> None:
        """Remove any item; its key is dropped when it comes to the top of the heap."""
        del self._items[item.request_id]
        self._num_of_class[item.priority] -= 1
        if not self._items:
            self._heap.clear()
